"""Rewards in processes that can be killed, or in threads for a function that only this process has.

`RewardWorkers` keeps a few child processes (`process/callable_process.py`) that have loaded the environment's `score`.
Each scores one completion at a time, so the time of each call is known, and a call that hangs blocks only one worker.
A failure is never scored as 0:

    a finite number                             SCORED, reward = float(value)
    a raise, NaN, None, a string, sys.exit      REWARD_ERROR, reward None, the error's text and line as detail
    no answer after `timeout_seconds`           REWARD_TIMEOUT, reward None
    an exit, a crash                            REWARD_CRASH, reward None
    MemoryError, or more than `memory_mib`      REWARD_MEMORY, reward None

After the last three the worker is replaced, and `restarts` counts it. A worker that is killed while it loads or is idle
is replaced as well, without effect on any completion. If SIGKILL ends a worker during a call, or SIGSTOP stops it until
the time is over, the cause is probably outside: the completion is scored once more, and only the second time counts.
Cost: 0.13 ms a completion. A replaced worker imports its libraries again (1 s for reasoning_gym) beside the others.

`FunctionRewards` calls a notebook's function, a lambda or a closure in a thread, with the same statuses. Such a call
can't be ended: after its time-out the thread continues, and slows the run down if it computes. Memory has no limit of
its own, code that crashes the interpreter ends the run, and long computations share Python's lock with the run.
"""

from __future__ import annotations

import math
import pickle
import select
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from octetrl.environments.calls import CallResult, Calls
from octetrl.environments.scoring import (
    CheckedScorer,
    Key,
    RewardTimes,
    RoundAtTheEnd,
    Score,
    Scorer,
    ScoringRound,
    TimeoutBudget,
    Verdict,
    score_all,
)
from octetrl.process.callable_process import Answer, CallableProcess, Cause, ProcessDied
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError
from octetrl.system.host import num_cores

GROW_SECONDS = 0.5  # that calls wait for a free process before the number of processes doubles
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError, RecursionError)  # the exceptions of `pickle.dumps`
_LOAD_ATTEMPTS = 3  # replacements in a row of a worker that was killed while it loaded
_POLL_SECONDS = 1.0


class Growth:
    """The number of processes: `processes` from the start, or None: one, and up to a core each while calls wait."""

    def __init__(self, processes: int | None) -> None:
        self.first = processes or 1
        self._most = processes or num_cores()
        self._waiting_since: float | None = None

    def grows_at(self) -> float:
        """When further processes would be started, by the monotonic clock."""
        return math.inf if self._waiting_since is None else self._waiting_since + GROW_SECONDS

    def more(self, waiting: int, processes: int) -> int:
        """How many processes to start now. waiting: calls without a process."""
        now = time.monotonic()
        if not waiting or processes >= self._most:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now >= self.grows_at():
            self._waiting_since = now
            return min(processes, waiting, self._most - processes)
        return 0


@dataclass(slots=True, eq=False)
class _Call:
    """One completion to be scored."""

    key: Key
    task: Task
    text: str
    deadline: float = math.inf
    may_repeat: bool = True  # if its process is killed or stopped from outside
    seconds: float = 0.0  # that it took


Running = dict[CallableProcess, _Call]


class RewardWorkers:
    """`processes` child processes that hold `scorer`; use as a context manager, or `close` it.

    scorer: picklable `(task, completion_text) -> float`, such as `environment.score`. Limits: timeout_seconds for a
    reward, load_seconds for loading the scorer, memory_mib for a worker with all processes that it starts (None: no
    limit). processes None: one, and more while completions wait, up to one per core. gives_up: if the first calls of a
    round all time out, the others are not called. Raises UserError at once if a worker can't load the scorer. Not
    thread-safe.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        timeout_seconds: float,
        processes: int | None = 1,
        memory_mib: int | None = None,
        load_seconds: float = 120.0,
        gives_up: bool = True,
    ) -> None:
        self._scorer = CheckedScorer(scorer)
        self._growth, self._gives_up = Growth(processes), gives_up
        self._timeout, self._load_seconds = timeout_seconds, load_seconds
        self._memory_mib = memory_mib
        self._failed_loads = 0  # in a row
        self._has_loaded = False
        self.restarts = 0
        self._workers: list[CallableProcess] = []
        self._workers = [self._start() for _ in range(self._growth.first)]
        while not any(worker.is_ready for worker in self._workers):
            self._look({}, deque(), waits=True)

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        return score_all(self.begin(), completions)

    def begin(self) -> RewardRound:
        """Completions that are scored as they end (scoring.py). One round at a time."""
        return RewardRound(self)

    def advance(self, queue: deque[_Call], running: Running, *, waits: bool) -> dict[Key, Score]:
        """Start calls on idle workers, and return the scores that have arrived."""
        for worker in list(self._workers):
            if queue and worker.is_ready and worker not in running:
                self._begin(worker, queue, running)
        self._workers += [self._start() for _ in range(self._growth.more(len(queue), len(self._workers)))]
        return self._look(running, queue, waits=waits)

    def timeout_budget(self) -> TimeoutBudget | None:
        """For one round. None: it waits for every call."""
        return TimeoutBudget(len(self._workers)) if self._gives_up else None

    def end(self, running: Running) -> None:
        """Replace the workers of calls whose answers are no longer needed."""
        for worker in running:
            self._replace(worker)

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> CallableProcess:
        try:
            return CallableProcess(self._scorer, memory_mib=self._memory_mib)
        except UNPICKLABLE as error:
            raise UserError(
                f"environment: the reward can't be sent to a process of its own ({error});"
                " define it at the top level of a module"
            ) from error

    def _begin(self, worker: CallableProcess, queue: deque[_Call], running: Running) -> None:
        call = queue[0]
        try:
            worker.send(call.task, call.text)
        except ProcessDied:  # it was killed while it was idle, not by this completion
            self._replace(worker)
            return
        except UNPICKLABLE as error:
            raise _unsendable(call.task, error) from error
        queue.popleft()
        call.deadline = time.monotonic() + self._timeout
        running[worker] = call

    def _look(self, running: Running, queue: deque[_Call], *, waits: bool) -> dict[Key, Score]:
        """Return the finished scores, and remove their workers from `running`. waits: until a worker sends something or
        a deadline is reached. A call that is made once more goes back into the queue."""
        scores: dict[Key, Score] = {}

        def end(worker: CallableProcess, score: Score, is_from_outside: bool) -> None:
            call = running.pop(worker)
            call.seconds = max(call.seconds, time.monotonic() - call.deadline + self._timeout)
            if is_from_outside and call.may_repeat:
                call.may_repeat = False
                queue.appendleft(call)
            else:
                scores[call.key] = score

        for worker in self._readable(running, self._seconds_left(running) if waits else 0.0):
            if worker not in running:
                self._greet(worker)
                continue
            score, is_from_outside = self._take_score(worker)
            if score is not None:
                end(worker, score, is_from_outside)
        now = time.monotonic()
        for worker in [worker for worker, call in running.items() if call.deadline <= now]:
            text = f"no reward after {self._timeout:g} s; raise environment.reward_timeout_seconds"
            end(worker, Score(RolloutStatus.REWARD_TIMEOUT, None, text), worker.is_stopped)
            self._replace(worker)
        for worker in [worker for worker in self._workers if not worker.is_ready]:
            if worker.started + self._load_seconds <= now:
                reason = f"it did not load in {self._load_seconds:g} s; raise environment.load_timeout_seconds"
                self._load_again(worker, reason, always=False)
        return scores

    def _seconds_left(self, running: Running) -> float:
        """Seconds until the first deadline, or until further processes start."""
        deadlines = [call.deadline for call in running.values()]
        if deadlines:
            deadlines.append(self._growth.grows_at())
        deadlines += [worker.started + self._load_seconds for worker in self._workers if not worker.is_ready]
        return max(0.0, min(deadlines, default=0.0) - time.monotonic())

    def _readable(self, running: Running, seconds: float) -> list[CallableProcess]:
        """Workers that have sent something. Waits up to `seconds` for the first."""
        awaited = {worker.fileno(): worker for worker in self._workers if worker in running or not worker.is_ready}
        if not awaited:
            return []
        poll = select.poll()  # select() accepts only descriptors below 1024
        for descriptor in awaited:
            poll.register(descriptor, select.POLLIN)
        return [awaited[descriptor] for descriptor, _ in poll.poll(math.ceil(seconds * 1000))]

    def _take_score(self, worker: CallableProcess) -> tuple[Score | None, bool]:
        """The answer to the running call, None if it is not complete yet; and whether the worker was killed, perhaps
        from outside."""
        try:
            answer = worker.take()
        except ProcessDied as error:
            self._replace(worker)
            status = RolloutStatus.REWARD_CRASH if error.memory_mib is None else RolloutStatus.REWARD_MEMORY
            return Score(status, None, self._death(error)), error.signal == signal.SIGKILL
        return None if answer is None else _score(answer), False

    def _greet(self, worker: CallableProcess) -> None:
        """Read the greeting of a worker that loads. Raises UserError if it could not load the scorer."""
        try:
            greeting = worker.take()
        except ProcessDied as error:
            if not error.signal:
                raise self._refusal(self._death(error)) from error
            self._load_again(worker, self._death(error), always=True)
            return
        if greeting is None:
            return
        if greeting.error is not None:
            refusal = self._refusal(greeting.error)
            raise UserError(greeting.error) if greeting.cause == "user" else refusal
        self._failed_loads = 0
        self._has_loaded = True

    def _load_again(self, worker: CallableProcess, reason: str, *, always: bool) -> None:
        """Replace a worker that was killed or is late, at most a few times, because the scorer may not be the cause.
        always: also if no worker has ever loaded."""
        self._failed_loads += 1
        if self._failed_loads >= _LOAD_ATTEMPTS or not (always or self._has_loaded):
            raise self._refusal(reason)
        self._replace(worker)

    def _refusal(self, reason: str) -> UserError:
        self.close()
        return UserError(
            f"environment: a reward process could not load the reward ({reason});"
            " define it at the top level of a module that imports from the working directory"
        )

    def _death(self, error: ProcessDied) -> str:
        within_limit = error.memory_mib is None
        return f"{error}{'' if within_limit else f'; environment.reward_memory_mib allows {self._memory_mib:,}'}"

    def _replace(self, worker: CallableProcess) -> None:
        worker.kill()
        self.restarts += 1
        self._workers[self._workers.index(worker)] = self._start()


class RewardRound(ScoringRound):
    """Completions that reward processes score while others are sampled (scoring.py)."""

    def __init__(self, workers: RewardWorkers) -> None:
        self._workers = workers
        self._calls: list[_Call] = []
        self._queue: deque[_Call] = deque()
        self._running: Running = {}
        self._scores: dict[Key, Score] = {}
        self._budget = workers.timeout_budget()

    def __exit__(self, *error: object) -> None:
        self._workers.end(self._running)

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        self._calls.append(_Call(key, task, completion_text))
        self._queue.append(self._calls[-1])

    def advance(self) -> None:
        """Read scores and start further calls. Does not wait. Raises UserError for a task that can't be sent."""
        self._advance(waits=False)

    def so_far(self) -> dict[Key, Score]:
        return dict(self._scores)

    @property
    def is_done(self) -> bool:
        return not self._queue and not self._running

    def finish(self) -> dict[Key, Score]:
        """The scores by key. Waits for all of them."""
        began = time.monotonic()
        while not self.is_done:
            self._advance(waits=True)
        self.times = RewardTimes(waited=time.monotonic() - began)
        for call in self._calls:
            self.times = self.times.followed_by(RewardTimes(slowest=call.seconds, slowest_task=call.task.id))
        return self.so_far()

    def _advance(self, *, waits: bool) -> None:
        new = self._workers.advance(self._queue, self._running, waits=waits)
        self._scores |= new
        if self._budget is None:
            return
        for score in new.values():
            self._budget.ended(timed_out=score.status is RolloutStatus.REWARD_TIMEOUT)
        if self._budget.is_over:
            self._scores |= {call.key: self._budget.score for call in self._queue}
            self._queue.clear()


class FunctionRewards:
    """Calls `scorer` in at most `at_once` threads of this process; `timeout_seconds` is the limit of one call.
    gives_up: if the first calls of a step all time out, the others are not called."""

    def __init__(self, scorer: Scorer, *, timeout_seconds: float, at_once: int = 1, gives_up: bool = True) -> None:
        self._scorer = CheckedScorer(scorer)
        self._timeout, self._at_once, self._gives_up = timeout_seconds, at_once, gives_up
        self._calls = Calls()

    def begin(self) -> RoundAtTheEnd:
        return RoundAtTheEnd(self, times=True)

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        scores: dict[int, Score] = {}
        queue = deque(enumerate(completions))
        places: dict[int, int] = {}  # by ticket
        budget = TimeoutBudget(self._at_once)
        try:
            while queue or places:
                while queue and len(places) < self._at_once:
                    place, arguments = queue.popleft()
                    places[self._calls.start(self._scorer, arguments, seconds=self._timeout)] = place
                for ticket, called in self._calls.poll(_POLL_SECONDS):
                    scores[places.pop(ticket)] = self._score(called)
                    budget.ended(timed_out=called.timed_out)
                if self._gives_up and budget.is_over:
                    scores |= {place: budget.score for place, _ in queue}
                    queue.clear()
        finally:
            self._calls.forget()  # interrupted: the answers are no longer needed
        return [scores[place] for place in range(len(completions))]

    def close(self) -> None:
        """Stop waiting for calls. Threads of calls that hang continue; their results are dropped."""
        self._calls.close()

    def _score(self, called: CallResult) -> Score:
        if called.timed_out:
            reason = "its thread still runs; raise environment.reward_timeout_seconds"
            return Score(RolloutStatus.REWARD_TIMEOUT, None, f"no reward after {self._timeout:g} s; {reason}")
        cause: Cause = "memory" if (called.error or "").startswith("MemoryError") else "raised"
        return _score(Answer(called.value, called.error, called.trace, cause))


def _score(answer: Answer) -> Score:
    """The score in a worker's answer, checked again: foreign code in the worker may have replaced `CheckedScorer`."""
    if answer.error is not None:
        status = RolloutStatus.REWARD_MEMORY if answer.cause == "memory" else RolloutStatus.REWARD_ERROR
        return Score(status, None, answer.error, answer.trace)
    match answer.value:
        case (_, _, _, dict(), dict()) if (verdict := Verdict(*answer.value)).is_sound:
            return Score(
                RolloutStatus.SCORED,
                verdict.reward,
                verdict.detail,
                answered=verdict.answered,
                components=verdict.components,
                metrics=verdict.metrics,
            )
    return Score(RolloutStatus.REWARD_ERROR, None, "the process gave what is no reward")


def check_sendable(task: Task) -> None:
    """Raises UserError for a task that can't be sent to a reward process."""
    try:
        pickle.dumps(task)
    except UNPICKLABLE as error:
        raise _unsendable(task, error) from error


def _unsendable(task: Task, error: Exception) -> UserError:
    """The error for a task that can't be pickled; it names the first such value of the metadata."""
    place = "it"
    for key, value in task.metadata.items():
        try:
            pickle.dumps(value)
        except UNPICKLABLE:
            place = f"metadata['{key}']"
            break
    reason = " ".join(str(error).split())[:200]
    return UserError(
        f"environment: task '{task.id}' can't be sent to a reward process: {place} can't be pickled ({reason});"
        f" give tasks plain values, such as numbers, texts, lists and dictionaries"
    )
