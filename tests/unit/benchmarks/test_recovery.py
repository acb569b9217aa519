"""`benchmarks.recovery` on a process that writes and says what a run would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recovery import Watched, measure
from octetrl.config.errors import UserError

RUN = """
import json, subprocess, sys, time
folder, resumed = sys.argv[1:]

def step(number):
    with open(f"{folder}/metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": number, "time/step": 0.5, "mismatch/max_abs_diff": 0.0}) + "\\n")

worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open(f"{folder}/workers.json", "w") as file:
    json.dump({"workers": [{"pid": 1}, {"pid": worker.pid}]}, file)
step(1), step(2)
worker.wait()
time.sleep(0.2), print("worker 1 ended\\n  building all workers again", flush=True)
time.sleep(0.4), print(f"resumed after step {resumed} from a folder", flush=True)
time.sleep(0.3), step(3), step(4)
"""


def watched(folder: Path, resumed: int) -> Watched:
    return Watched([sys.executable, "-c", RUN, str(folder), str(resumed)], folder)


def test_the_times_of_a_killed_worker(tmp_path: Path) -> None:
    found = measure(watched(tmp_path, 2), after=0.2)
    assert found["recovery/notice_seconds"] >= 0.2 and found["recovery/build_seconds"] >= 0.4
    assert found["recovery/step_seconds"] >= 0.3 and found["time/step"] == 0.5
    parts = sum(found[f"recovery/{part}_seconds"] for part in ("notice", "build", "step"))
    assert parts - 0.401 <= found["recovery/lost_seconds"] <= parts + 0.001, "at most 0.4 s were left of the step"


def test_a_step_that_ended_first_measures_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="had ended before its worker was missed"):
        measure(watched(tmp_path, 3), after=0.2)


def test_a_run_that_ends_is_named_with_its_last_lines(tmp_path: Path) -> None:
    run = Watched([sys.executable, "-c", "print('recipe: no such key')"], tmp_path)
    with pytest.raises(UserError, match="ended before step 2: recipe: no such key"):
        measure(run, after=0.2)


def test_bad_settings_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.recovery", "--cpus", "2", "--model", "tiny", "trainer.epoch=2"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "did you mean" in ended.stderr and "Traceback" not in ended.stderr
