"""Environments and rewards named as `module:name`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octetrl.config.errors import UserError
from octetrl.environments.base import Taskset
from octetrl.environments.python_object import load_environment, load_object
from octetrl.environments.scoring import RewardWorkers


def test_the_example_environment_is_found_and_scores_in_a_worker() -> None:
    environment = load_environment("examples.custom_environment:Backwards")
    tasks = Taskset(environment.tasks, eval_size=2, seed=0).next_batch(3)
    with RewardWorkers(environment.score, timeout_seconds=10.0) as workers:
        scores = workers.score([(task, str(task.answer)) for task in tasks])
    assert [score.reward for score in scores] == [1.0, 1.0, 1.0]


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_only_here.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("environment.reward", "mine_only_here:value") == 7


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys\nsys.exit(0)", "fails when imported (SystemExit: 0 (ending_environment.py:2))"),
        ("import os\nos._exit(0)", "ends its process when imported (the process exited with code 0)"),
        ("raise KeyboardInterrupt", "fails when imported (KeyboardInterrupt: (ending_environment.py:1))"),
        ("import time\ntime.sleep(60)", "was not imported in 1 s; mend it, or raise environment.load_timeout_seconds"),
        ("import sys\nclass Made:\n    def __init__(self): sys.exit(0)", "ends its process when made (sys.exit(0))"),
    ],
)
def test_a_module_that_ends_its_process_or_hangs_does_not_reach_the_run(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_environment.py").write_text(f"{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ending_environment", raising=False)
    with pytest.raises(UserError) as refusal:
        load_environment("ending_environment:Made", seconds=1.0)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_colon", "is not of the form 'module:name'"),
        ("no_such_module_at_all:name", "does not import"),
        ("examples.custom_environment:Backward", "did you mean 'Backwards'?"),
        ("examples.custom_environment:WORDS", "has no tasks and no score"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(path: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_environment(path)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("environment.dataset: ")
