"""Runs whose agents work in boxes: what happens to a box is no failure of the policy, and nothing is left."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_agents import AGENT, read_bytes
from tests.e2e.tiny_run import read_lines, run
from tests.unit.boxes.made import ENGINES, config_of

FETCHES = """
import json, os, sys, urllib.request
body = {"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request))["id"])
"""
WGET = """exec wget -q -O - --header "Content-Type: application/json" --header "Authorization: Bearer $OPENAI_API_KEY" \
--post-data '{"model": "any", "messages": [{"role": "user", "content": "'"$1"'"}]}' $OPENAI_BASE_URL/chat/completions"""
COMMANDS = {
    "bubblewrap": ["python3", "-c", FETCHES, "{prompt}"],
    **{kind: ["sh", "-c", WGET, "sh", "{prompt}"] for kind in ENGINES},
}


def boxed(config: Any, mark: str, **changes: Any) -> dict[str, Any]:
    """mark: stands in the command line of each box."""
    marked = ("--setenv", mark, "1") if config.kind == "bubblewrap" else ("--label", mark)
    box = config.model_copy(update={"options": (*config.options, *marked)}).model_dump(exclude_defaults=True)
    return {"environment.box": box, "steps": 1, "rollout.prompts_per_step": 2, **changes}


def that_are_left(mark: str) -> list[bytes]:
    lines = [read_bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [line for line in lines if mark.encode() in line]


def test_a_lost_box_has_no_reward_and_nothing_of_any_box_is_left(model: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    changes = {**AGENT, "environment.dataset": "tests.e2e.tiny_boxes:Boxed", "environment.max_failure_share": 0.9}
    (line,) = run(model, tmp_path / "run", boxed(config_of("bubblewrap", tmp_path), mark, **changes))
    rows = read_lines(tmp_path / "run/rollouts/step_000001.jsonl")
    for row in rows:
        is_killed = int(row["prompt"].split()[0]) % 2 == 0
        assert row["status"] == ("box_error" if is_killed else "scored"), row
        assert row["reward"] is None if is_killed else row["reward"] >= 0.1
    assert line["rollout/box_error"] == Counter(row["status"] for row in rows)["box_error"] > 0
    assert line["mismatch/max_abs_diff"] == 0.0
    assert not that_are_left(mark)


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_in_a_box_without_a_network_calls_the_policy(kind: str, model: Path, tmp_path: Path) -> None:
    mark, agent = uuid.uuid4().hex, {"command": COMMANDS[kind]}
    config = config_of(kind, tmp_path)
    changes = boxed(config, mark, **{"environment.agent": agent})
    (line,) = run(model, tmp_path / "run", changes)
    rows = read_lines(tmp_path / "run/rollouts/step_000001.jsonl")
    assert all(row["status"] == "scored" and "chatcmpl" in row["result"] for row in rows)
    assert line["mismatch/max_abs_diff"] == 0.0 and line["environment/turns"] == 1
    assert not that_are_left(mark)
