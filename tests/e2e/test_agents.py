"""Runs whose rollouts are programs: what they sampled is what is trained, whatever they do with it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octetrl.telemetry.rollout_metrics import FailureShareError
from tests.e2e.tiny_run import read_lines, run
from tests.unit.workers.thread_team import run_on, steps_of

AGENT: dict[str, Any] = {
    "environment.kind": "python",
    "environment.reward": None,
    "rollout.stop": ["e", "a", "1"],
}


def agents(name: str, **changes: Any) -> dict[str, Any]:
    return {**AGENT, "environment.dataset": f"tests.e2e.tiny_agents:{name}", **changes}


def test_branches_streams_and_parallel_calls_are_trained_as_they_were_sampled(model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", agents("Caller", steps=2))
    for line in lines:
        assert line["mismatch/max_abs_diff"] == 0.0 and line["grad_norm"] > 0
        assert line["environment/turns"] == 4 and line["rollout/segments"] >= 2
        assert line["agent/ignored_options"] == 1
    rows = [row for step in (1, 2) for row in read_lines(tmp_path / f"run/rollouts/step_{step:06d}.jsonl")]
    for row in rows:
        assert row["status"] == "scored"
        sampled, trained = row["metrics"]["agent/sampled_tokens"], len(row["token_ids"])
        assert (
            sampled == trained + row["metrics"]["agent/discarded_tokens"] + row["metrics"]["agent/constrained_tokens"]
        )


def test_agents_on_one_or_three_workers_are_trained_alike(model: Path, tmp_path: Path) -> None:
    lines = []
    for count in (1, 3):
        with run_on(count, model, tmp_path / str(count), **agents("Caller", steps=1)) as live:
            _, (line,) = steps_of(live, 1)
        assert line["mismatch/max_abs_diff"] == 0.0 and line["rollout/segments"] >= 2
        lines.append({name: value for name, value in line.items() if name != "agent/engine_share"})
    assert lines[0] == pytest.approx(lines[1], rel=1e-6)  # a sum over workers has another order


def test_how_an_agent_ends_is_its_status_and_no_failure_is_a_reward_of_0(model: Path, tmp_path: Path) -> None:
    changes = {
        "steps": 1, "rollout.prompts_per_step": 8, "environment.max_failure_share": 0.9,
        "environment.turns": {"max_turns": 2},
    }  # fmt: skip
    (line,) = run(model, tmp_path / "run", agents("Failing", **changes))
    rows = read_lines(tmp_path / "run/rollouts/step_000001.jsonl")
    statuses = {0: "agent_error", 1: "scored", 2: "unfinished", 3: "scored"}
    for row in rows:
        kind = int(row["prompt"].split()[0]) % 4
        assert row["status"] == statuses[kind], row
        assert (row["reward"] is None) == (kind == 0)
    counted = Counter(row["status"] for row in rows)
    assert line["rollout/agent_error"] == counted["agent_error"] > 0
    assert line["rollout/unfinished"] == counted["unfinished"] > 0
    assert line["mismatch/max_abs_diff"] == 0.0


def test_agents_that_all_fail_end_the_run_and_train_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FailureShareError, match="8 x agent_error"):
        run(model, tmp_path / "run", agents("Broken", steps=1))
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["rollout/agent_error"] == 8 and "grad_norm" not in line and line["time/agent"] > 0
    assert line["agent/late_requests"] == 0 < line["agent/sampled_tokens"]


PROGRAM = """
import json, os, subprocess, sys, urllib.request
prompt = sys.argv[1]
subprocess.Popen(["sleep", "7654"], start_new_session=True)
def ask(text):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
said = ask(prompt) + ask("and " + prompt)
sys.exit("no shop today") if len(said) % 2 == 0 else print(said)
"""


def test_a_command_is_an_agent_and_nothing_of_it_is_left(model: Path, tmp_path: Path) -> None:
    agent = {"command": [sys.executable, "-c", PROGRAM, "{prompt}"]}
    changes = {"environment.agent": agent, "environment.max_failure_share": 0.99, "steps": 1, "seed": 7}
    (line,) = run(model, tmp_path / "run", changes)
    assert line["mismatch/max_abs_diff"] == 0.0 and line["environment/turns"] == 2
    rows = read_lines(tmp_path / "run/rollouts/step_000001.jsonl")
    failed = [row for row in rows if row["status"] == "agent_error"]
    assert 0 < len(failed) < len(rows) and all(row["reward"] is None for row in failed)
    assert all("no shop today" in row["detail"] for row in failed)
    assert all(row["result"] in row["text"].replace("\n", "") for row in rows if row not in failed)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"7654" in read_bytes(path)]


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
