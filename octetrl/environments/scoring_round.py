"""Scores the completions of one collection of rollouts, each as soon as it ends.

    with begin_round(scorer) as scoring:
        scoring.submit(key, task, text)    for each completion, while others are still being sampled
        scoring.advance()                  after every forward of the engine; never waits
        scores = scoring.finish()          by key; waits for those that are missing

Reward processes (scoring.py) and judges (judge.py) work beside the engine. Other scorers need what the engine uses, the
GPU or Python's lock. They score all completions in `finish`, in the order of their keys.

A step waits for rewards if they are slower than sampling. `RewardTimes` measures the wait and keeps the slowest call,
so that a run can say which task is slow. `Growth` says when another process helps. `TimeoutBudget` gives up when the
first calls of a step all time out: otherwise a score that always hangs would be waited for once per rollout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from octetrl.environments.score import Score
from octetrl.records import Task
from octetrl.system.threads import num_cores

GROW_SECONDS = 0.5  # that calls wait for a free process before the number of processes doubles
LEAST_TRIED = 4  # time-outs in a row, from the first call of a step on, before the others are given up


@dataclass(slots=True)
class RewardTimes:
    """Seconds since the last `take`."""

    waited: float = 0.0  # after sampling had ended
    slowest: float = 0.0  # call
    slowest_task: str = ""
    last: RewardTimes | None = None  # what the last `take` returned

    def called(self, task_id: str, seconds: float) -> None:
        if seconds > self.slowest:
            self.slowest, self.slowest_task = seconds, task_id

    def take(self) -> RewardTimes:
        """What was measured since the last call."""
        self.last = RewardTimes(self.waited, self.slowest, self.slowest_task)
        self.waited, self.slowest, self.slowest_task = 0.0, 0.0, ""
        return self.last

    def forget(self) -> None:
        """Drops what was measured since the last `take`, and `last` stays: an evaluation is no part of a step."""
        last = self.last
        self.take()
        self.last = last


class Growth:
    """The number of processes: `processes` from the start, or None: one, and up to a core each while calls wait."""

    def __init__(self, processes: int | None) -> None:
        self.first = processes or 1
        self._most = processes or num_cores()
        self._waiting_since: float | None = None

    def grows_at(self) -> float | None:
        """When further processes would be started, by the monotonic clock. None: they would not."""
        return None if self._waiting_since is None else self._waiting_since + GROW_SECONDS

    def more(self, waiting: int, processes: int) -> int:
        """How many processes to start now. waiting: calls without a process."""
        if not waiting or processes >= self._most:
            self._waiting_since = None
            return 0
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < GROW_SECONDS:
            return 0
        self._waiting_since = now
        return min(processes, waiting, self._most - processes)


class TimeoutBudget:
    """Whether the calls of one step are worth waiting for. `tried`: time-outs, all of the first calls, that end it."""

    def __init__(self, tried: int) -> None:
        self._tried = max(tried, LEAST_TRIED)
        self._ended = self._timed_out = 0

    def ended(self, *, timed_out: bool) -> None:
        self._timed_out += timed_out
        self._ended += 1

    @property
    def is_over(self) -> bool:
        return self._ended == self._timed_out >= self._tried

    @property
    def reason(self) -> str:
        return f"not called, because the first {self._timed_out} calls of the step returned nothing in time"


Key = tuple[int, int]  # of a completion: place of its task in the step, sibling


class ScoringRound(Protocol):
    """Completions that are being scored. Leaving the context abandons those that have no score yet."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def submit(self, key: Key, task: Task, completion_text: str, /) -> None:
        """Adds a completion. Does not wait."""

    def advance(self) -> None:
        """Reads scores and starts further calls. Does not wait."""

    def so_far(self) -> dict[Key, Score]:
        """The scores that have arrived. Does not wait."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` need not wait, or begins the work itself."""

    def finish(self) -> dict[Key, Score]:
        """The scores of all completions."""


class BatchScorer(Protocol):
    """A scorer: RewardWorkers, FunctionRewards, Judge, or workers with a reward model."""

    def score(self, completions: Sequence[tuple[Task, str]], /) -> list[Score]: ...


class OpenScorer(BatchScorer, Protocol):
    """A scorer with processes, threads or connections of its own: RewardWorkers, FunctionRewards or Judge."""

    def close(self) -> None: ...


@runtime_checkable
class ConcurrentScorer(Protocol):
    """A scorer that can score while the engine samples."""

    def begin(self) -> ScoringRound: ...


@runtime_checkable
class TimedScorer(Protocol):
    """A scorer that measures how long rewards take."""

    @property
    def times(self) -> RewardTimes: ...


@runtime_checkable
class RestartingScorer(Protocol):
    """A scorer with processes of its own that are replaced after a crash or a time-out."""

    @property
    def restarts(self) -> int:
        """Processes that were replaced since the run began."""


def begin_round(scorer: BatchScorer) -> ScoringRound:
    """A round of `scorer`. One at a time."""
    return scorer.begin() if isinstance(scorer, ConcurrentScorer) else _RoundAtTheEnd(scorer)


def score_all(opened: ScoringRound, completions: Sequence[tuple[Task, str]]) -> list[Score]:
    """The score of each (task, completion text), in their order, by a round that has just begun."""
    with opened as scoring:
        for number, (task, text) in enumerate(completions):
            scoring.submit((number, 0), task, text)
        scores = scoring.finish()
    return [scores[number, 0] for number in range(len(completions))]


class _RoundAtTheEnd:
    def __init__(self, scorer: BatchScorer) -> None:
        self._scorer = scorer
        self._completions: dict[Key, tuple[Task, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        self._completions[key] = (task, completion_text)

    def advance(self) -> None:
        pass

    def so_far(self) -> dict[Key, Score]:
        return {}

    is_done = True

    def finish(self) -> dict[Key, Score]:
        keys = sorted(self._completions)
        return dict(zip(keys, self._scorer.score([self._completions[key] for key in keys]), strict=True))
