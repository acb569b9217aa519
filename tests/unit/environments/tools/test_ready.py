"""The tools that ship: calculator and search alone, and in an environment that a recipe names."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.config.environment import EnvironmentConfig
from octetrl.environments.tools.calculator import calculate, calculator
from octetrl.environments.tools.definition import Tool, ToolError, tool
from octetrl.environments.tools.search import Corpus, Passage, read_passages, search_tool
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


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("2 * 3^2", "18"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 2", "3.5"),
        ("-7 // 2", "-4"),
        ("7 × 6 − 2 ÷ 1", "40"),
        ("2**1000 % 1000007", str(pow(2, 1000, 1000007))),
        ("sqrt(16) + abs(-1)", "5"),
        ("round(2.675, 1)", "2.7"),
        ("comb(5, 2) + factorial(5) + gcd(12, 18)", "136"),
        ("pi", "3.14159265359"),
        ("1 +\n 1", "2"),
    ],
)
def test_values(expression: str, shown: str) -> None:
    assert asyncio.run(calculator.call({"expression": expression})) == shown


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("9**9**9**9", "too large"),
        ("(-3)**(10**9)", "too large"),
        ("1e308 * 10", "too large"),
        ("factorial(171)", "factorial takes whole numbers from 0 to 170"),
        ("comb(10**9, 10**8)", "comb takes whole numbers from 0 to 1000"),
        ("round(5, -10**9)", "round to digits takes whole numbers from -300 to 300"),
        ("1 / 0", "divides by zero"),
        ("0 ** -2000", "divides by zero"),
        ("(-8) ** (1/3)", "not a real number"),
        ("sqrt(-1)", "has no value"),
        ("__import__('os').system('true')", "'__import__('os').system('true')' is not arithmetic"),
        ("().__class__", "is not arithmetic"),
        ("x + 1", "'x' is not a known name"),
        ("'a' * 10**9", "is not arithmetic"),
        ("[1] * 10**9", "is not arithmetic"),
        ("3 +", "is not an arithmetic expression"),
        ("  ", "nothing to compute"),
        ("1+" * 500 + "1", "1000 are allowed"),
        ("-" * 900 + "1", "nested too deeply"),
        ("(" * 400 + "1" + ")" * 400, "is not an arithmetic expression"),
    ],
)
def test_what_is_not_computed_is_said_in_one_line_and_at_once(expression: str, said: str) -> None:
    began = time.process_time()
    with pytest.raises(ToolError) as refusal:
        calculate(expression)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)
    assert time.process_time() - began < 1.0


@given(st.text(alphabet="0123456789.+-*/%^() ,esqrtpifaclog_'[]\n", max_size=40) | st.text(max_size=40))
def test_any_text_gives_a_finite_number_or_is_refused(expression: str) -> None:
    try:
        value = calculate(expression)
    except ToolError:
        return
    assert type(value) in (int, float) and math.isfinite(value)


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40), st.integers(0, 12))
def test_whole_numbers_are_exact(a: int, b: int, n: int) -> None:
    assert calculate(f"({a}) * ({b}) + ({a}) ^ {n}") == a * b + a**n


ROWS = [
    {"title": "Oslo", "text": "Oslo is the capital of Norway. The winter is cold."},
    {"title": "Lima", "text": "Lima is the capital of Peru, and the desert is near."},
    {"text": "Gold melts at 1064 degrees."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    pytest.importorskip("bm25s")
    path = tmp_path / "facts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    return path


def found(tool: Tool, query: str) -> str:
    return asyncio.run(tool.call({"query": query}))


def test_the_passage_with_the_rarest_words_comes_first(corpus: Path) -> None:
    tool = search_tool(corpus)
    assert found(tool, "What is the capital of Peru?").startswith("[1] Lima: Lima is the capital of Peru")
    assert found(tool, "capital Norway").splitlines()[0].startswith("[1] Oslo")
    assert found(tool, "GOLD 1064") == "[1] Gold melts at 1064 degrees."
    assert len(found(search_tool(corpus, results=1), "capital").split("\n\n")) == 1
    assert found(search_tool(corpus, max_letters=10), "gold") == "[1] Gold melts..."


def test_a_search_without_results_or_words_is_told(corpus: Path) -> None:
    tool = search_tool(corpus)
    assert found(tool, "zebra").startswith("Nothing in the collection has any word of 'zebra'")
    with pytest.raises(ToolError, match="has no words"):
        found(tool, "?!")


def test_the_tool_can_be_sent_to_another_process(corpus: Path) -> None:
    tool = search_tool(corpus, name="look_up")
    again: Tool = pickle.loads(pickle.dumps(tool))
    assert again.schema() == tool.schema() and found(again, "gold") == found(tool, "gold")


def test_a_folder_of_texts_is_cut_at_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "long.txt").write_text("\n\n".join(f"word{n} " * 100 for n in range(3)) + "\n\nshort\n")
    (tmp_path / "note.md").write_text("one\n\ntwo\n")
    (tmp_path / "picture.png").write_bytes(b"\x00")
    passages = read_passages(tmp_path)
    assert [passage.title for passage in passages] == ["long", "long", "long", "note"]
    assert passages[3] == Passage("one\ntwo", "note") and passages[2].text.endswith("\nshort")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n{"tex": "b"}', 'facts.jsonl:2: no "text" that is a string'),
        (b'{"text": "a"}\n\nnot json', "facts.jsonl:3: not JSON"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b'{"text": " ?! "}', "there are no words in it"),
        (None, "no such file"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, content: bytes | None, said: str) -> None:
    pytest.importorskip("bm25s")
    path = tmp_path / "facts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        search_tool(path)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"pip install 'octetrl\[search\]'"):
        Corpus([Passage("a")])
