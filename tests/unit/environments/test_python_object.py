"""Environments and rewards that a recipe names as `module:name`, and the examples that show how."""

from __future__ import annotations

import importlib
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.config.environment import EnvironmentConfig
from octetrl.environments.python_object import PythonReward, load_environment, load_object, result_of
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.tasks import Taskset
from octetrl.records import RolloutStatus, Task
from octetrl.run.environment import build_environment, build_taskset
from octetrl.system.errors import Terminated, UserError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> None:
    (folder / f"{name}.py").write_text(f"{body}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_the_examples_score_in_a_worker() -> None:
    environment = load_environment("examples.custom_environment:Backwards")
    task = Taskset(environment.tasks, eval_size=2, seed=0).next_batch(1)[0]
    with RewardWorkers(environment.score, timeout_seconds=60.0) as workers:
        scores = workers.score([(task, task.id[::-1]), (task, task.id), (task, "?")])
    assert [score.reward for score in scores] == [1.0, 0.5, 0.0]
    reward = PythonReward("examples.custom_reward:short_and_right")
    task = Task(id="t", prompt="3 + 4", answer="7")
    with RewardWorkers(reward, timeout_seconds=60.0) as workers:
        right, wrong, broken = workers.score([(task, "7"), (task, "8"), (Task(id="u", prompt="?"), "7")])
    assert right.reward == pytest.approx(0.999)
    assert wrong.reward == 0.0
    assert broken.status is RolloutStatus.REWARD_ERROR
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_modules_are_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_only_here.py").write_text("value = 7\ndef one(task, text): return 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("environment.reward", "mine_only_here:value") == 7
    with RewardWorkers(PythonReward("mine_only_here:one"), timeout_seconds=60.0) as workers:
        assert workers.score([(Task(id="t", prompt="?"), "")])[0].reward == 1.0


@pytest.mark.parametrize(
    ("path", "body", "environment_says", "reward_says"),
    [
        ("no_colon", "", "is not of the form 'module:name'", "is not of the form 'module:name'"),
        ("ending.py:E", "", "names a file; write its module, 'ending:E'", "names a file"),
        ("no_such_module_at_all:E", "", "does not import", "does not import"),
        ("ending:Backward", "class Backwards: pass", "did you mean 'Backwards'?", "did you mean 'Backwards'?"),
        ("ending:E", "E = 3", "has no tasks and no score", "is an int, not a function"),
        ("ending:E", "def E(:", "fails when imported (SyntaxError:", "fails when imported (SyntaxError:"),
        ("ending:E", "1 / 0", "fails when imported (ZeroDivisionError:", "could not load the reward (ZeroDivision"),
        ("ending:E", "import sys\nsys.exit(0)", "fails when imported (SystemExit: 0", "(SystemExit: 0"),
        (
            "ending:E",
            "import os\nos._exit(0)",
            "ends its process when imported (the process exited",
            "exited with code",
        ),
        (
            "ending:E",
            "from pathlib import Path\nif (first := Path(__file__ + '.seen')).exists(): exit(0)\nfirst.touch()\nE = 1",
            "fails when imported (SystemExit: 0",
            "",
        ),
        ("ending:E", "raise KeyboardInterrupt", "fails when imported (KeyboardInterrupt", "(KeyboardInterrupt"),
        ("ending:E", "import time\ntime.sleep(60)", "was not imported in 0.5 s", "it did not load in 0.5 s"),
        ("ending:E", "import sys\nclass E:\n    def __init__(self): sys.exit(0)", "(SystemExit: 0", ""),
    ],
)
def test_what_can_not_be_loaded_is_one_line_and_does_not_end_the_run(
    path: str, body: str, environment_says: str, reward_says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "ending", body)
    seconds = 0.5 if "sleep" in body else 60.0
    with pytest.raises(UserError) as refusal:
        load_environment(path, seconds=seconds)
    assert environment_says in str(refusal.value) and "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("environment.dataset: ")
    if reward_says:
        with pytest.raises(UserError) as refusal:
            RewardWorkers(PythonReward(path), timeout_seconds=60.0, load_seconds=seconds)
        assert reward_says in str(refusal.value) and "\n" not in str(refusal.value)


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
        ("tasks = Seq(1 << 60)", "at most 100,000,000 can be"),
        ("tasks = Seq(8)", "fails (RuntimeError: no such row"),
        ("tasks = [Task('a', 'p'), Task('b', 3)]", "tasks[1]: its prompt is an int; give a text"),
        ("tasks = [Task('a', 'p', 4)]", "its answer is an int"),
        ("tasks = [Task('a', 'p')] * 8", "8 tasks have the id 'a'"),
        ("tasks = property(lambda self: sys.exit(3))", "reading its tasks fails (SystemExit: 3"),
        ("tasks = []\n    def __getattr__(self, name): raise RuntimeError(name)", "reading its answered fails"),
        ("tasks = [Task('a', 'p')]\n    def reply(self): pass", "takes (), but is called with (conversation)"),
        ("tasks = [Task('a', 'p')]\n    def finish(self, a, b): pass", "the finish of 'wrong_tasks:E'"),
    ],
)
def test_an_environment_that_no_run_can_use(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "wrong_tasks", f"{HEAD}    {body}")
    importlib.import_module("wrong_tasks")  # without a separate process: nothing is wrong with its import
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
    write_module(tmp_path, monkeypatch, "hostile_tasks", HOSTILE)
    monkeypatch.chdir(tmp_path)
    config = EnvironmentConfig(kind="python", dataset="hostile_tasks:E", eval_size=2)
    taskset = build_taskset(build_environment(config), config)
    assert len({task.id for task in (*taskset.next_batch(6), *taskset.held_out())}) == 8
    hostile: Any = sys.modules["hostile_tasks"]
    hostile.drawn = 99
    with pytest.raises(UserError, match=r"'hostile_tasks:E': tasks\[\d\] fails \(ValueError: no such task"):
        taskset.next_batch(1)
    assert Path.cwd() == tmp_path and torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
    assert sys.stdout is not None and sys.stderr is not None


def test_a_working_directory_that_was_removed_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert result_of(lambda: torch.set_default_dtype(torch.float64) or 7, "making it") == 7
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("error", [Terminated, KeyboardInterrupt])
def test_a_signal_that_ends_the_run_is_not_a_fault_of_the_environment(error: type[BaseException]) -> None:
    def stop() -> None:
        raise error

    with pytest.raises(error):
        result_of(stop, "making it")


def test_an_environments_own_keyboard_interrupt_is_not_ctrl_c() -> None:
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
