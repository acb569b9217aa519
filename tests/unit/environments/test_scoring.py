"""A reward that hangs, crashes or lies never becomes a 0, never leaks a process and never costs the others."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octetrl.config.errors import UserError
from octetrl.environments.scoring import RewardWorkers, Score
from octetrl.records import RolloutStatus, Task

sys.path.append(str(Path(__file__).parent))  # where a reward worker will look too
misbehaving_rewards = importlib.import_module("misbehaving_rewards")
TASK = Task(id="task", prompt="?")


@pytest.fixture
def workers() -> Iterator[RewardWorkers]:
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=0.5, processes=2) as workers:
        yield workers


def scores_of(workers: RewardWorkers, *texts: str) -> list[Score]:
    return workers.score([(TASK, text) for text in texts])


def has_ended(pid: int) -> bool:
    """Whether process `pid` is gone, or dead and only not yet waited for."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_rewards_come_back_in_order(workers: RewardWorkers) -> None:
    texts = ["x" * length for length in range(60)]
    scores = scores_of(workers, *texts)
    assert [score.reward for score in scores] == list(range(60))
    assert {score.status for score in scores} == {RolloutStatus.SCORED}
    assert scores_of(workers) == []


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("raise", "KeyError: 'missing column' (misbehaving_rewards.py:"),
        ("exit", "the process exited with code 3"),
        ("crash", "the process was killed by signal 6"),
        ("nan", "ValueError: the reward is nan, not a finite number"),
        ("none", "TypeError: the reward is 'None' of type NoneType, not a number"),
        ("text", "TypeError: the reward is '1.0' of type str, not a number"),
    ],
)
def test_no_reward_is_an_error_and_not_a_zero(workers: RewardWorkers, text: str, detail: str) -> None:
    before, bad, after = scores_of(workers, "abc", text, "abcd")
    assert (before.reward, after.reward) == (3.0, 4.0)
    assert bad.status is RolloutStatus.REWARD_ERROR
    assert bad.reward is None
    assert bad.detail is not None
    assert bad.detail.startswith(detail)


@pytest.mark.parametrize("text", ["hang", "hang in C"])
def test_a_hang_is_killed_at_its_time(workers: RewardWorkers, text: str) -> None:
    started = time.monotonic()
    before, hung, after = scores_of(workers, "abc", text, "abcd")
    assert time.monotonic() - started < 3.0
    assert hung.status is RolloutStatus.REWARD_TIMEOUT
    assert hung.reward is None
    assert (before.reward, after.reward) == (3.0, 4.0)
    assert scores_of(workers, "abcde")[0].reward == 5.0  # a killed worker's successor works


def test_booleans_are_numbers_and_prints_are_harmless(workers: RewardWorkers) -> None:
    assert [score.reward for score in scores_of(workers, "bool", "print")] == [1.0, 0.25]


def test_a_reward_may_say_why(workers: RewardWorkers) -> None:
    explained, plain = scores_of(workers, "explain", "xy")
    assert explained == Score(RolloutStatus.SCORED, 0.25, "one of four")
    assert plain == Score(RolloutStatus.SCORED, 2.0)


def test_no_process_is_left_after_close(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=0.5) as workers:
        pids = [int(scores_of(workers, "pid")[0].reward or 0)]
        assert workers.score([(Task(id=str(pid_file), prompt="?"), "child")])[0].reward is None
        pids += [int(pid_file.read_text()), int(scores_of(workers, "pid")[0].reward or 0)]
    assert all(has_ended(pid) for pid in pids), pids


def test_a_worker_killed_from_outside_is_replaced(workers: RewardWorkers) -> None:
    for score in scores_of(workers, "pid", "pid"):
        os.kill(int(score.reward or 0), signal.SIGKILL)
    time.sleep(0.1)
    assert [score.reward for score in scores_of(workers, "a", "bc", "def")] == [1.0, 2.0, 3.0]


RUN = """
import signal, sys, time
import misbehaving_rewards
from octetrl.environments.scoring import RewardWorkers
from octetrl.records import Task
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
workers = RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=60, processes=2)
task = Task(id="task", prompt="?")
print(*{int(score.reward) for score in workers.score([(task, "pid")] * 40)}, flush=True)
try:
    workers.score([(task, "hang"), (task, "hang in C")])
except KeyboardInterrupt:
    print(workers.score([(task, "after")])[0].reward, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_no_orphan(how: signal.Signals) -> None:
    path = os.pathsep.join(sys.path)
    run = subprocess.Popen(
        [sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.stdout is not None
    pids = [int(word) for word in run.stdout.readline().split()]
    time.sleep(0.3)  # both workers hang by now, one of them holding the interpreter's lock
    run.send_signal(how)
    rest, _ = run.communicate(timeout=20)
    assert rest == ("5.0\n" if how is signal.SIGINT else "")
    assert pids
    assert all(has_ended(pid) for pid in pids), pids


def test_a_reward_that_can_not_travel_is_the_users_error() -> None:
    with pytest.raises(UserError, match="define it at the top level of a module"):
        RewardWorkers(lambda task, text: 1.0, timeout_seconds=1.0)
