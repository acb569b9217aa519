"""Scores the completions of one collection of rollouts, each as soon as it ends.

    with begin_round(scorer) as scoring:
        scoring.submit(key, task, text)    for each completion, while others are still being sampled
        scoring.advance()                  after every forward of the engine; never waits
        scores = scoring.finish()          by key; waits for those that are missing

Reward processes (scoring.py) and judges (judge.py) work beside the engine. Other scorers need what the engine uses, the
GPU or Python's lock. They score all completions in `finish`, in the order of their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from octetrl.environments.reward_times import RewardTimes
from octetrl.environments.score import Score
from octetrl.records import Task

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


class ScoresAll(Protocol):
    """A scorer: RewardWorkers, FunctionRewards, Judge, or workers with a reward model."""

    def score(self, completions: Sequence[tuple[Task, str]], /) -> list[Score]: ...


class OpenScorer(ScoresAll, Protocol):
    """A scorer with processes, threads or connections of its own: RewardWorkers, FunctionRewards or Judge."""

    def close(self) -> None: ...


@runtime_checkable
class WorksBesideTheEngine(Protocol):
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


def begin_round(scorer: ScoresAll) -> ScoringRound:
    """A round of `scorer`. One at a time."""
    return scorer.begin() if isinstance(scorer, WorksBesideTheEngine) else _RoundAtTheEnd(scorer)


def score_all(opened: ScoringRound, completions: Sequence[tuple[Task, str]]) -> list[Score]:
    """The score of each (task, completion text), in their order, by a round that has just begun."""
    with opened as scoring:
        for number, (task, text) in enumerate(completions):
            scoring.submit((number, 0), task, text)
        scores = scoring.finish()
    return [scores[number, 0] for number in range(len(completions))]


class _RoundAtTheEnd:
    def __init__(self, scorer: ScoresAll) -> None:
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
