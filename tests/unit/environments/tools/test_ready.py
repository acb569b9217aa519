"""What a recipe's `environment` section names is what is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.environment import EnvironmentConfig
from octetrl.environments.tools import tool
from octetrl.run.environment import build_environment
from octetrl.system.errors import UserError
from tests.unit.environments.playing import play


@tool
def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


not_a_tool = 3


@pytest.fixture
def sums(tmp_path: Path) -> str:
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} * 7?", "answer": f"It is #### {n * 7}"} for n in range(3)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def built(sums: str, **fields: Any) -> Any:
    given = {"kind": "math", "dataset": sums, "columns": {"prompt": "question"}, "reference_marker": "####", **fields}
    return build_environment(EnvironmentConfig.model_validate(given))


def test_math_with_a_calculator_is_answered_after_a_call(sums: str) -> None:
    environment = built(sums, tools=("calculator",))
    words = iter(['<tool_call>{"name": "calculator", "arguments": {"expression": "2 * 7"}}</tool_call>', "So 14."])
    played = play(environment, lambda conversation: next(words), task=2, family="hermes")
    assert played.said[2] == ("tool", "14")
    assert environment.score(environment.tasks[2], played.conversation.text) == 1.0


def test_tools_are_named_by_the_recipe(sums: str, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "facts.txt").write_text("Seven times two is fourteen.")
    named = ("search", "calculator", "tests.unit.environments.tools.test_ready:double")
    environment = built(sums, tools=named, corpus=str(tmp_path / "facts.txt"))
    assert [one.name for one in environment.tools] == ["search", "calculator", "double"]
    assert not hasattr(built(sums), "tools")
    rewarded = built(sums, tools=("calculator",), reward="tests.e2e.tiny_rewards:by_text")
    assert len(rewarded.tools) == 1 and rewarded.score is not built(sums).score


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.unit.environments.tools.test_ready:not_a_tool", "is an int, not a tool; put @tool before its def"),
        ("tests.unit.environments.tools.test_ready:doubel", "did you mean 'double'?"),
    ],
)
def test_what_is_no_tool_is_refused(sums: str, name: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        built(sums, tools=(name,))
    assert said in str(refusal.value) and str(refusal.value).startswith("environment.tools: ")
