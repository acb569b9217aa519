"""The learning-curve benchmark on a CPU: what an arm leaves behind, and how arms end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import learning_curve
from benchmarks.learning_curve import Arm, arm_row, run_until
from tests.e2e import tiny_run

SMALL = (
    "cluster.device=cpu cluster.cpu_threads=1 model.context_length=128 rollout.prompts_per_step=2"
    " rollout.group_size=2 rollout.max_prompt_tokens=100 rollout.max_new_tokens=4 engine.page_size=16"
    f" environment.kind=jsonl environment.dataset={Path(tiny_run.__file__).with_name('sums.jsonl')}"
    " environment.parameters={} environment.eval_size=2 mismatch.fail_above=null"
    " trainer.tokens_per_micro_batch=512 environment.reward=tests.e2e.tiny_rewards:by_text"
)
ENDLESS = """
import itertools, json, pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if {polite} else None)
run = pathlib.Path({run!r}); run.mkdir(parents=True)
with (run / "metrics.jsonl").open("w") as file:
    for step in itertools.count(1):
        file.write(json.dumps({{"step": step, "reward/mean": step / 2, "loss": 1.0}}) + "\\n")
        file.flush()
        time.sleep(0.05)
"""


def test_two_steps(tmp_path: Path) -> None:
    model = tiny_run.make_model(tmp_path / "Tiny-Model")
    words = f"--model {model} --precision fp8_full --out {tmp_path} --kv-cache-tokens 2048 --steps 2 --eval-every 2"
    assert learning_curve.main([*words.split(), *SMALL.split()]) == 0
    result = json.loads((tmp_path / "learning_tiny-model.json").read_text())
    (arm,) = result["arms"]
    assert (arm["precision"], arm["steps"], arm["of_steps"], arm["ended"]) == ("fp8_full", 2, 2, "all steps")
    before, first, second = result["rows"]
    assert [row["step"] for row in result["rows"]] == [0, 1, 2]
    assert "reward/mean" not in before and "eval/accuracy" in before
    assert "eval/accuracy" not in first and "eval/accuracy" in second
    assert first["mismatch/max_abs_diff"] == second["mismatch/max_abs_diff"] == 0.0
    assert 0.0 < first["seconds"] <= second["seconds"] == arm["seconds"]


@pytest.mark.parametrize(("polite", "last_step"), [(True, 120.0), (False, 0.5)])  # who is polite ends long before
def test_the_clock_ends_an_arm(polite: bool, last_step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_curve, "LAST_STEP_SECONDS", last_step)
    arm = arm_of(tmp_path, ENDLESS.format(polite=polite, run=str(tmp_path / "run")))
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 60.0
    while not (metrics.exists() and metrics.stat().st_size):  # it has its handler by now
        assert time.monotonic() < end
        time.sleep(0.01)
    began = time.monotonic()
    asked = run_until([arm], began, 1.0 + last_step)
    assert asked and (1.0 if polite else 1.5) <= time.monotonic() - began < 100.0
    assert arm.process.returncode == (130 if polite else -signal.SIGKILL)
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    row = arm_row(arm, 10**6, asked)
    assert (row["ended"], row["steps"]) == ("clock", len(written))
    assert [row["step"] for row in arm.rows()] == list(range(1, len(written) + 1))


def test_an_arm_that_fails(tmp_path: Path) -> None:
    arm = arm_of(tmp_path, "raise SystemExit(1)")
    asked = run_until([arm], time.monotonic(), 60.0)
    assert not asked and arm.ending(asked) == "failed" and arm.rows() == []


def arm_of(folder: Path, program: str) -> Arm:
    def start(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code])

    return Arm("bf16", 0, folder, process=start(program), evaluation=start(""))
