"""A reward that hangs, crashes or lies never becomes a 0, never leaks a process and never costs the others."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octetrl.environments.reward_workers import RewardWorkers, check_sendable
from octetrl.environments.scoring import Score
from octetrl.process import callable_process, supervised
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError

sys.path.append(str(Path(__file__).parent))  # where a reward worker will look too
misbehaving_rewards = importlib.import_module("misbehaving_rewards")
TASK = Task(id="task", prompt="?")


@pytest.fixture
def workers() -> Iterator[RewardWorkers]:
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=30.0, processes=2) as workers:
        yield workers


def scores_of(workers: RewardWorkers, *texts: str) -> list[Score]:
    return workers.score([(TASK, text) for text in texts])


def has_ended(pid: int, patience: int = 1500) -> bool:
    """Whether process `pid` is gone, or dead and only not yet waited for."""
    for _ in range(patience):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_process_that_was_ended_before_it_was_ready_is_dead() -> None:
    process = callable_process.CallableProcess(misbehaving_rewards.by_name)
    process.kill()
    with pytest.raises(callable_process.ProcessDied):
        process.call(TASK, "", seconds=60.0)


def test_rewards_come_back_in_order(workers: RewardWorkers) -> None:
    texts = [*("x" * length for length in range(60)), "bool"]
    scores = scores_of(workers, *texts)
    assert [score.reward for score in scores] == [*range(60), 1.0]
    assert {score.status for score in scores} == {RolloutStatus.SCORED}
    assert scores_of(workers) == []


NO_REWARD = {  # text -> its status, its detail
    RolloutStatus.REWARD_ERROR: {
        "raise": "KeyError: 'missing column' (misbehaving_rewards.py:",
        "exit": "SystemExit: 0 (misbehaving_rewards.py:",
        "interrupt": "KeyboardInterrupt: not by anybody (misbehaving_rewards.py:",
        "unspeakable": "Unspeakable: its text raises SystemExit (misbehaving_rewards.py:",
        "nan": "ValueError: the reward is nan, not a finite number",
        "none": "TypeError: the reward is None, not a number; its function may lack a return",
    },
    RolloutStatus.REWARD_CRASH: {
        "exit at once": "the process exited with code 0",
        "crash": "the process was killed by signal 6",
        "close descriptors": "the process closed descriptors that were not its own",
        "replace descriptors": "the process closed descriptors that were not its own",
        "become another program": "the process closed its connection and still runs",
        "kill the supervisor": "the process that keeps the worker was killed by signal 9",
        "send junk": "the process sent what is no answer (",
    },
    RolloutStatus.REWARD_MEMORY: {
        "grow": "its processes held 2NN MiB; environment.reward_memory_mib allows 200",
        "grow in a child": "its processes held 2NN MiB; environment.reward_memory_mib allows 200",
        "ask for much": "MemoryError: ",
    },
    RolloutStatus.REWARD_TIMEOUT: dict.fromkeys(("hang", "hang in C"), "no reward after 1.5 s; raise environment."),
}


@pytest.mark.parametrize(
    ("status", "restarts", "limits"),
    [
        (RolloutStatus.REWARD_ERROR, 0, {}),
        (RolloutStatus.REWARD_CRASH, 8, {}),  # a kill by signal 9 may have come from outside: once more
        (RolloutStatus.REWARD_MEMORY, 2, {"memory_mib": 200}),  # one asked for much, and its worker goes on
        (RolloutStatus.REWARD_TIMEOUT, 2, {"timeout_seconds": 1.5, "processes": 2}),
    ],
)
def test_no_reward_has_its_status_and_costs_no_other(
    status: RolloutStatus, restarts: int, limits: dict[str, Any]
) -> None:
    """Each call between two that have a reward: the worker that follows a killed one works."""
    with RewardWorkers(misbehaving_rewards.by_name, **{"timeout_seconds": 60.0, **limits}) as workers:
        scores = scores_of(workers, "abc", *(text for bad in NO_REWARD[status] for text in (bad, "abcd")))
        assert [score.reward for score in scores] == [3.0, *[None, 4.0] * len(NO_REWARD[status])]
        for bad, detail in zip(scores[1::2], NO_REWARD[status].values(), strict=True):
            assert bad.status is status and re.sub(r"held \d\d\d", "held 2NN", str(bad.detail)).startswith(detail)
        assert workers.restarts == restarts


def test_a_forked_child_gives_no_answers() -> None:
    """Neither for its parent nor, a place late, for the calls that follow."""
    texts = ["come back from a fork", "ab", "answer from a fork", "abc", "come back from a fork", "answer from a fork"]
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=60.0) as workers:
        scores = scores_of(workers, *texts, "abcd")
        assert [score.reward for score in scores] == [1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 4.0]
        assert workers.restarts == 0


def test_a_supervisor_that_gets_no_core_still_says_how_its_worker_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report comes later than it does on a machine with little work."""
    monkeypatch.setattr(callable_process, "_REPORT_SECONDS", 0.05)
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=60.0) as workers:
        (bad,) = scores_of(workers, "exit beside a slow supervisor")
    assert (bad.status, bad.detail) == (RolloutStatus.REWARD_CRASH, "the process exited with code 3")


def test_what_a_worker_sends_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with RewardWorkers(misbehaving_rewards.AnswersWithCode(), timeout_seconds=60.0) as workers:
        (score,) = workers.score([(Task(id=str(marker), prompt="?"), "")])
    assert not marker.exists()
    assert score.status is RolloutStatus.REWARD_ERROR
    assert score.detail is not None and score.detail.startswith("TypeError: a Runs is not plain data")


def test_a_flood_of_prints_is_cut_and_said(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=60.0) as workers:
        assert [score.reward for score in scores_of(workers, "print", "flood", "abc")] == [0.25, 0.5, 3.0]
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.startswith("noise on stdout\n")
    assert len(printed.err) < 3 << 20
    assert "printed 1 MiB; what more it prints is left out\n" in printed.err


def test_a_stopped_supervisor_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "_END_SECONDS", 0.2)
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=1.5) as workers:
        pid = int(scores_of(workers, "pid")[0].reward or 0)
        assert scores_of(workers, "stop the supervisor")[0].status is RolloutStatus.REWARD_TIMEOUT
        assert has_ended(pid)
        assert scores_of(workers, "abc")[0].reward == 3.0


def test_no_process_is_left_after_close(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=1.5) as workers:
        pids = [int(scores_of(workers, "pid")[0].reward or 0)]
        assert workers.score([(Task(id=str(pid_file), prompt="?"), "child")])[0].reward is None
        pids += [int(pid_file.read_text()), *(int(score.reward or 0) for score in scores_of(workers, "pid", "orphan"))]
        assert not has_ended(pids[-1], patience=1)  # a server that a reward keeps from call to call
    assert all(has_ended(pid) for pid in pids), pids


def test_a_worker_killed_from_outside_is_replaced(workers: RewardWorkers) -> None:
    for pid in {int(score.reward or 0) for score in scores_of(workers, "pid", "pid")}:  # of one worker or of two
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert [score.reward for score in scores_of(workers, "a", "bc", "def")] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("how", "seconds"), [(signal.SIGKILL, 30.0), (signal.SIGSTOP, 2.0)])
def test_a_completion_whose_worker_is_killed_or_stopped_from_outside_is_scored_again(
    how: signal.Signals, seconds: float, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"

    def strike() -> None:
        until = time.monotonic() + 60.0
        while not begun.exists() or not begun.read_text():
            assert time.monotonic() < until
            time.sleep(0.005)
        os.kill(int(begun.read_text()), how)

    with RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=seconds) as workers:
        striker = threading.Thread(target=strike)
        striker.start()
        scores = workers.score([(Task(id=str(begun), prompt="?"), text) for text in ("hang once", "ab")])
        striker.join()
        assert [score.reward for score in scores] == [0.75, 2.0]
        assert workers.restarts == 1


def test_a_worker_killed_or_late_while_it_loads_is_replaced(tmp_path: Path) -> None:
    scorer = misbehaving_rewards.Loading(tmp_path, 120.0, 3)
    killed: list[int] = []
    with RewardWorkers(scorer, timeout_seconds=60.0, load_seconds=4.0) as workers:
        killer = threading.Thread(target=lambda: killed.append(kill_loading(tmp_path, number=1)))
        killer.start()
        crashed, after = scores_of(workers, "exit at once", "abc")
        killer.join()
        assert (crashed.status, after.reward) == (RolloutStatus.REWARD_CRASH, 3.0)
        assert workers.restarts == 3  # crashed, killed, late
    assert killed and len(list(tmp_path.iterdir())) == 4


def kill_loading(folder: Path, number: int) -> int:
    until = time.monotonic() + 60.0
    while not (found := list(folder.glob(f"{number}-*"))):
        assert time.monotonic() < until
        time.sleep(0.01)
    pid = int(found[0].name.partition("-")[2])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_scorer_that_never_loads_is_refused_at_its_time(tmp_path: Path) -> None:
    (tmp_path / "0-0").touch()
    started = time.monotonic()
    with pytest.raises(UserError, match=r"did not load in 0\.5 s; raise environment\.load_timeout_seconds"):
        RewardWorkers(misbehaving_rewards.Loading(tmp_path, 60.0, 9), timeout_seconds=9.0, load_seconds=0.5)
    assert time.monotonic() - started < 30.0  # it takes 60 s to load


RUN = """
import signal, sys, time
import misbehaving_rewards
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.records import Task
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
workers = RewardWorkers(misbehaving_rewards.by_name, timeout_seconds=60, processes=2)
task = Task(id="task", prompt="?")
pids = {int(score.reward) for score in workers.score([(task, "pid")] * 40 + [(task, "orphan")])}
try:
    print(*pids, flush=True)
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
    time.sleep(0.3)  # both workers usually hang by now, one of them holding the interpreter's lock
    run.send_signal(how)
    rest, _ = run.communicate(timeout=120)
    assert rest == ("5.0\n" if how is signal.SIGINT else "")
    assert pids
    assert all(has_ended(pid) for pid in pids), pids


def test_a_reward_that_can_not_travel_is_the_users_error() -> None:
    with pytest.raises(UserError, match="define it at the top level of a module"):
        RewardWorkers(lambda task, text: 1.0, timeout_seconds=1.0)


def test_a_task_that_cant_be_pickled_is_named_with_its_key(workers: RewardWorkers) -> None:
    task = Task(id="sums/7", prompt="?", metadata={"seed": 7, "judge": lambda text: 1.0})
    with pytest.raises(UserError, match=r"task 'sums/7' .* metadata\['judge'\] can't be pickled") as caught:
        workers.score([(TASK, "fine"), (task, "x")])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"metadata\['judge'\]"):
        check_sendable(task)
    check_sendable(TASK)
    assert [score.reward for score in scores_of(workers, "x")] == [1.0]  # the others serve on
