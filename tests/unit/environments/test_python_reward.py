"""Rewards of the user's own, and the examples that show how."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from octetrl.environments.base import Environment, Taskset
from octetrl.environments.python_reward import PythonReward
from octetrl.environments.rewards import ExactScorer
from octetrl.environments.scoring import RewardWorkers
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def test_the_example_reward() -> None:
    reward = PythonReward("examples.custom_reward:short_and_right")
    task = Task(id="t", prompt="3 + 4", answer="7")
    with RewardWorkers(reward, timeout_seconds=60.0) as workers:
        right, wrong, broken = workers.score([(task, "7"), (task, "8"), (Task(id="u", prompt="?"), "7")])
    assert right.reward == pytest.approx(0.999)
    assert wrong.reward == 0.0
    assert broken.status is RolloutStatus.REWARD_ERROR


def test_the_example_environment() -> None:
    from examples.custom_environment import Backwards

    environment: Environment = Backwards()
    task = Taskset(environment.tasks, eval_size=2, seed=0).next_batch(1)[0]
    with RewardWorkers(environment.score, timeout_seconds=60.0) as workers:
        scores = workers.score([(task, task.id[::-1]), (task, task.id), (task, "?")])
    assert [score.reward for score in scores] == [1.0, 0.5, 0.0]


def test_the_working_directory_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text("def one(task, text):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    with RewardWorkers(PythonReward("rewards_of_mine:one"), timeout_seconds=60.0) as workers:
        assert workers.score([(Task(id="t", prompt="?"), "")])[0].reward == 1.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "not of the form 'module:name'"),
        ("no_such_module:f", "'no_such_module' does not import"),
        ("examples.custom_reward:short_and_write", "did you mean 'short_and_right'"),
        ("broken_reward:f", "fails when imported (SyntaxError:"),
    ],
)
def test_a_reward_that_does_not_import_is_one_line(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"environment\.reward") as caught:
        RewardWorkers(PythonReward(path), timeout_seconds=60.0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys\nsys.exit(0)", "could not load the reward (SystemExit: 0"),
        ("import os\nos._exit(0)", "could not load the reward (the process exited with code 0)"),
        ("raise KeyboardInterrupt", "could not load the reward (KeyboardInterrupt:"),
        ("1 / 0", "could not load the reward (ZeroDivisionError: division by zero"),
    ],
)
def test_a_reward_module_that_ends_its_process_is_refused(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_reward.py").write_text(f"{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as caught:
        RewardWorkers(PythonReward("ending_reward:f"), timeout_seconds=60.0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_the_path_travels() -> None:
    reward = PythonReward("examples.custom_reward:short_and_right")
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_exact_answers() -> None:
    task = Task(id="t", prompt="?", answer="Paris")
    assert [ExactScorer("####")(task, text) for text in ("#### Paris ", "#### paris", "Paris")] == [1.0, 0.0, 0.0]
    assert ExactScorer()(task, "Paris\n") == 1.0
    with pytest.raises(ValueError, match="no answer"):
        ExactScorer()(Task(id="t", prompt="?"), "x")
