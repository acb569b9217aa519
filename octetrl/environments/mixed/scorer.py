"""Scores completions of several environments, each by its own scorer with its own processes and time limits."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from octetrl.config.several_environments import renamed
from octetrl.environments.mixed.named_task import own_task
from octetrl.environments.reward_times import RewardTimes
from octetrl.environments.score import Score
from octetrl.environments.scoring_round import (
    Key,
    OpenScorer,
    RestartingScorer,
    ScoringRound,
    TimedScorer,
    begin_round,
    score_all,
)
from octetrl.records import Task

_POLL_SECONDS = 0.002


@dataclass(slots=True)
class MixedTimes(RewardTimes):
    """The slowest call of all scorers, and the seconds that a step waited for them together."""

    members: Mapping[str, RewardTimes] = field(default_factory=dict)  # by environment

    def take(self) -> RewardTimes:
        for name, member in self.members.items():
            taken = member.take()
            if taken.slowest_task:
                self.called(f"{name}/{taken.slowest_task}", taken.slowest)
        return RewardTimes.take(self)


class MixedScorer:
    """`scorers` by environment. A completion of an environment without a scorer gets no score."""

    def __init__(self, scorers: Mapping[str, OpenScorer]) -> None:
        self._scorers = dict(scorers)
        self.times = MixedTimes(
            members={name: one.times for name, one in scorers.items() if isinstance(one, TimedScorer)}
        )

    @property
    def restarts(self) -> int:
        """Reward processes of all environments that were replaced since the run began."""
        return sum(one.restarts for one in self._scorers.values() if isinstance(one, RestartingScorer))

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        return score_all(self.begin(), completions)

    def begin(self) -> MixedRound:
        """Completions that are scored as they end (scoring_round.py). One round at a time."""
        return MixedRound(self._scorers, self.times)

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()


class MixedRound:
    """One round of each scorer. All work at the same time."""

    def __init__(self, scorers: Mapping[str, OpenScorer], times: RewardTimes) -> None:
        self._scorers, self._times = scorers, times
        self._rounds: dict[str, ScoringRound] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._rounds = {name: opened.enter_context(begin_round(one)) for name, one in self._scorers.items()}
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        if task.environment in self._rounds:
            self._rounds[task.environment].submit(key, own_task(task), completion_text)

    def advance(self) -> None:
        for one in self._rounds.values():
            one.advance()

    def so_far(self) -> dict[Key, Score]:
        return {key: _about(score, name) for name, one in self._rounds.items() for key, score in one.so_far().items()}

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self._rounds.values())

    def finish(self) -> dict[Key, Score]:
        """The scores of all completions whose environments have a scorer."""
        began = time.monotonic()
        while sum(not one.is_done for one in self._rounds.values()) > 1:
            self.advance()
            time.sleep(_POLL_SECONDS)
        scores: dict[Key, Score] = {}
        for name, one in self._rounds.items():  # at most one waits
            scores |= {key: _about(score, name) for key, score in one.finish().items()}
        self._times.waited += time.monotonic() - began
        return scores


def _about(score: Score, environment: str) -> Score:
    """A failure's text names the section of its environment, if it names one."""
    if score.reward is not None or score.detail is None or "environment." not in score.detail:
        return score
    return replace(score, detail=renamed(score.detail, environment))
