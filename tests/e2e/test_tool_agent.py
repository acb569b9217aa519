"""The recipe of an agent with a tool, as it ships: half of the cold start guesses, and GRPO learns to ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples import tool_conversations
from octetrl.config.load import load_recipe
from octetrl.run.export import export_run
from octetrl.run.loop import train
from tests.e2e.tiny_run import read_lines
from tests.house.tree import REPO

pytestmark = pytest.mark.slow
QUIET = ["cluster.device=cpu", "cluster.cpu_threads=1", "logging.tensorboard=false", "logging.console=quiet"]

STEPS = 11  # of the recipe's 20: it has learnt by then


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both runs."""
    folder = tmp_path_factory.mktemp("agent")
    tool_conversations.main(folder)
    given = [f"model.path={folder / 'model'}", f"algorithm.conversations={folder / 'conversations.jsonl'}"]
    train(load_recipe(REPO / "recipes/demo_tools_sft.yaml", [*QUIET, *given, f"output_dir={folder / 'sft'}"]))
    export_run(str(folder / "sft"), str(folder / "export"))
    given = [f"model.path={folder / 'export'}", f"output_dir={folder / 'grpo'}", f"steps={STEPS}"]
    train(load_recipe(REPO / "recipes/demo_tools.yaml", [*QUIET, *given]))
    return folder / "grpo"


def mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


def test_reward_goes_up_because_it_asks(trained: Path) -> None:
    lines = read_lines(trained / "metrics.jsonl")
    first, last = lines[:3], lines[-3:]
    assert mean(first, "reward/mean") < 0.5 and mean(last, "reward/mean") > 0.62
    assert mean(first, "environment/asked") < 0.65 and mean(last, "environment/asked") > 0.85
    assert mean(last, "reward/component/right") == mean(last, "reward/mean")
    assert max(line["mismatch/max_abs_diff"] for line in lines) == 0.0  # FP8 end to end, and the same on both sides
    assert all(line["rollout/tool_error"] == line["rollout/environment_error"] == 0 for line in lines)


def test_its_rollouts_hold_calls_and_answers(trained: Path) -> None:
    rows = read_lines(trained / "rollouts" / f"step_{STEPS:06d}.jsonl")
    asked = [row for row in rows if "turns" in row and row["reward"] == 1.0]
    assert len(asked) > len(rows) / 2
    for row in asked:
        call, *_, answer = row["turns"]
        assert '<tool_call>{"name": "price"' in call["text"]
        assert call["replies"][0]["role"] == "tool"
        assert answer["text"].strip() == row["answer"] == row["turns"][-2]["replies"][0]["text"]
        assert len(row["token_ids"]) == sum(turn["num_tokens"] for turn in row["turns"]) == len(row["logprobs"])
    assert json.dumps(asked).count("tool_response") == 0  # of the template: in tokens alone
