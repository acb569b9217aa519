"""Rewards in threads of this process: the same statuses as in processes, and which functions need it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from octetrl.environments.math_answers import MathScorer
from octetrl.environments.python_object import (
    PythonReward,
    can_run_elsewhere,
    given_name,
    importable_name,
    named_reward,
)
from octetrl.environments.reward_workers import FunctionRewards, RewardWorkers
from octetrl.environments.rewards import last_number
from octetrl.environments.scoring import Explained
from octetrl.environments.tasks import TaskEnvironment
from octetrl.environments.trl_rewards import TrlRewards
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError
from tests.unit.environments import trl_functions

TASK = Task("1", "2 + 3 =", "5")
released = threading.Event()  # ends what waits


def by_text(task: Task, text: str) -> Any:
    """What the text asks for; `wait` hangs."""
    match text:
        case "wait":
            released.wait(60.0)
        case "raise":
            raise ValueError("no")
        case "exit":
            raise SystemExit(3)
        case "memory":
            raise MemoryError
        case "text":
            return "1.0"
        case "nan":
            return float("nan")
        case "explained":
            return Explained(0.5, "half")
    return 1.0


def test_statuses_are_those_of_reward_processes() -> None:
    """Of everything that both may be asked: the same status, reward and detail, and the order of what was given."""
    texts = ["fine", "raise", "exit", "memory", "text", "nan", "explained", "fine"]
    here = FunctionRewards(by_text, timeout_seconds=60.0, at_once=3)
    with RewardWorkers(by_text, timeout_seconds=60.0) as processes:
        there = processes.score([(TASK, text) for text in texts])
    ours = here.score([(TASK, text) for text in texts])
    assert [(score.status, score.reward) for score in ours] == [(score.status, score.reward) for score in there]
    assert [score.detail for score in ours] == [score.detail for score in there]
    assert "ValueError: no" in str(ours[1].trace)
    here.close()


def test_a_call_that_hangs_is_a_timeout_and_the_others_are_scored() -> None:
    rewards = FunctionRewards(by_text, timeout_seconds=1.0)
    released.clear()
    scores = rewards.score([(TASK, "fine"), (TASK, "wait"), (TASK, "fine")])  # which nobody has released by now
    assert [score.status for score in scores] == [
        RolloutStatus.SCORED, RolloutStatus.REWARD_TIMEOUT, RolloutStatus.SCORED,
    ]  # fmt: skip
    assert "environment.reward_timeout_seconds" in str(scores[1].detail)
    hung = [thread for thread in threading.enumerate() if thread.name.startswith("environment call")]
    released.set()
    for thread in hung:
        thread.join(60.0)
    assert [score.reward for score in rewards.score([(TASK, "fine")])] == [1.0], "a late answer goes to nobody"


def test_at_most_so_many_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()
    two = threading.Barrier(2)  # each call waits for a second one

    def counted(task: Task, text: str) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        two.wait(30.0)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 1.0

    scores = FunctionRewards(counted, timeout_seconds=60.0, at_once=2).score([(TASK, str(n)) for n in range(6)])
    assert most == 2 and [score.reward for score in scores] == [1.0] * 6


class Local:
    def score(self, task: Task, text: str) -> float:
        return 1.0


def _closure() -> Callable[[Task, str], float]:
    wanted = "5"
    return lambda task, text: float(text == wanted)


def _of_main(task: Task, text: str) -> float:
    return 1.0


def _trl_of_main(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, columns["answer"], strict=True)]


_of_main.__module__ = _trl_of_main.__module__ = "__main__"


@pytest.mark.parametrize(
    ("scorer", "elsewhere"),
    [
        (last_number, True),
        (TaskEnvironment([TASK], last_number).score, True),
        (Local().score, True),
        (functools.partial(by_text, TASK), True),
        (_closure(), False),
        (_of_main, False),
        (TrlRewards([trl_functions.accuracy]), True),
        (TrlRewards([_trl_of_main]), False),
        (type("Made", (), {"__call__": lambda self, task, text: 1.0})(), False),
    ],
)
def test_what_a_process_can_import_runs_in_one(scorer: Any, elsewhere: bool) -> None:
    assert can_run_elsewhere(scorer) is elsewhere


def test_names_for_the_recipe() -> None:
    assert importable_name(last_number) == "octetrl.environments.rewards:last_number"
    assert importable_name(_of_main) is None
    assert given_name(_closure()) == "given:lambda"
    assert given_name(MathScorer()) == "given:MathScorer"
    closure = _closure()
    assert named_reward("given:lambda", {"given:lambda": closure}) is closure
    assert isinstance(named_reward("m:f", {}), PythonReward)
    with pytest.raises(UserError, match=r"'given:lambda' was given to octetrl.train in Python"):
        named_reward("given:lambda", {})
