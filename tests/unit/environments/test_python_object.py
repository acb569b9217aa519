"""Environments and rewards named as `module:name`."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import pytest
import torch

from octetrl.config.environment import EnvironmentConfig
from octetrl.environments.base import Taskset
from octetrl.environments.python_object import load_environment, load_object, result_of
from octetrl.environments.scoring import RewardWorkers
from octetrl.run.environment import build_environment, build_taskset
from octetrl.system.errors import Terminated, UserError


def test_the_example_environment_is_found_and_scores_in_a_worker() -> None:
    environment = load_environment("examples.custom_environment:Backwards")
    tasks = Taskset(environment.tasks, eval_size=2, seed=0).next_batch(3)
    with RewardWorkers(environment.score, timeout_seconds=60.0) as workers:
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
        ("import time\ntime.sleep(60)", "was not imported in 1 s; fix it, or raise environment.load_timeout_seconds"),
        (
            "import sys\nclass Made:\n    def __init__(self): sys.exit(0)",
            "making 'ending_environment:Made' ends its process (sys.exit(0))",
        ),
    ],
)
def test_a_module_that_ends_its_process_or_hangs_does_not_reach_the_run(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_environment.py").write_text(f"{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ending_environment", raising=False)
    with pytest.raises(UserError) as refusal:
        load_environment("ending_environment:Made", seconds=1.0 if "sleep" in body else 60.0)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_colon", "is not of the form 'module:name'"),
        ("rewards.py:exact", "'rewards.py:exact' names a file; write its module, 'rewards:exact'"),
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


HEAD = """
import sys
from octetrl.records import Task
class Seq:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): raise RuntimeError("no such row")
class E:
    def score(self, task, text): return 0.0
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("tasks = (Task(str(i), 'p') for i in range(8))", "its tasks are a generator; give a list of Task"),
        ("tasks = {'a': Task('a', 'p')}", "its tasks are a dict"),
        ("tasks = (None,) * 8", "tasks[0] is a NoneType, not a Task"),
        ("tasks = Seq(-1)", "len(tasks) fails (ValueError"),
        ("tasks = Seq(1 << 99)", "len(tasks) fails (OverflowError"),
        ("tasks = Seq(1 << 60)", "at most 100,000,000 can be"),
        ("tasks = Seq(8)", "fails (RuntimeError: no such row)"),
        ("tasks = [Task('a', 'p'), Task('b', 3)]", "tasks[1]: its prompt is an int; give a text"),
        ("tasks = [Task('a', 'p', 4)]", "its answer is an int"),
        ("tasks = [Task('a', 'p')] * 8", "8 tasks have the id 'a'"),
        ("tasks = property(lambda self: 1 / 0)", "reading its tasks fails (ZeroDivisionError"),
        ("tasks = property(lambda self: sys.exit(3))", "reading its tasks ends its process (sys.exit(3))"),
        (
            "tasks = []\n    def __getattr__(self, name): raise RuntimeError(name)",
            "reading its answered fails (RuntimeError",
        ),
    ],
)
def test_tasks_that_no_run_can_draw_from(body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_tasks.py").write_text(f"{HEAD}    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wrong_tasks", raising=False)
    importlib.import_module("wrong_tasks")  # here at once, as nothing is wrong with its import
    with pytest.raises(UserError) as refusal:
        load_environment("wrong_tasks:E")
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


HOSTILE = """
import os, sys, torch
from octetrl.records import Task
def act():
    sys.stdout = sys.stderr = None
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.chdir("/")
act()
class Tasks:
    def __len__(self): return 8
    def __getitem__(self, place):
        act()
        if drawn is not None and place != drawn: raise ValueError("no such task")
        return Task(str(place), f"p{place}")
class E:
    def __init__(self): act()
    tasks = property(lambda self: act() or Tasks())
    def score(self, task, text): return 0.0
drawn = None
"""


def test_what_an_environment_changes_for_the_whole_process_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_tasks.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = EnvironmentConfig(kind="python", dataset="hostile_tasks:E", eval_size=2)
    taskset = build_taskset(build_environment(config), config)
    assert len({task.id for task in (*taskset.next_batch(6), *taskset.held_out())}) == 8
    sys.modules["hostile_tasks"].drawn = 99  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"'hostile_tasks:E': tasks\[\d\] fails \(ValueError: no such task\)"):
        taskset.next_batch(1)
    assert Path.cwd() == tmp_path and torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert sys.stdout is not None and sys.stderr is not None


def test_a_working_directory_that_was_removed_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert result_of(lambda: torch.set_default_dtype(torch.float64) or 7, "making it") == 7
    assert torch.get_default_dtype() == torch.float32


def test_a_signal_that_ends_the_run_is_no_fault_of_the_environment() -> None:
    def stop() -> None:
        raise Terminated

    with pytest.raises(Terminated):
        result_of(stop, "making it")


def test_an_environments_own_keyboard_interrupt_is_no_ctrl_c() -> None:
    def make() -> None:
        raise KeyboardInterrupt

    def on_signal(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        with pytest.raises(UserError, match="making it raises KeyboardInterrupt"):
            result_of(make, "making it")
        with pytest.raises(KeyboardInterrupt):
            result_of(lambda: signal.raise_signal(signal.SIGINT), "making it")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["start", "reply", "finish"])
def test_what_is_called_with_a_conversation_must_take_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"talk_{name}.py").write_text(
        "from octetrl import Task\n"
        "class Talk:\n"
        "    tasks = (Task('a', 'hello'),)\n"
        "    def score(self, task, text): return 0.0\n"
        f"    def {name}(self): return None\n"
        "class Works(Talk):\n"
        f"    def {name}(self, conversation, quietly=True): return None\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"the {name} of 'talk_{name}:Talk' .*takes \(\), but is called with"):
        load_environment(f"talk_{name}:Talk")
    assert load_environment(f"talk_{name}:Works") is not None
