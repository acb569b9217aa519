"""Rollouts that an environment failed: their share, and the first traceback of each kind.

A rollout failed when it was drawn and has no reward: the reward or the environment raised, or gave no answer in time.
A prompt that is too long was never drawn, and a wrong answer has a reward; neither is a failure. Single failures are
data (they are left out and counted), but where most rollouts fail, the run learns from what is left over and should
rather stop: `environment.max_failure_share`.

Failures are of one kind when status and type of error are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octetrl.config.errors import RunFailed
from octetrl.records import Rollout, RolloutGroup, RolloutStatus

_SHOWN_KINDS = 5


class FailureShareError(RunFailed):
    """More rollouts failed than `environment.max_failure_share` allows."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Failures of one kind."""

    count: int
    first: Rollout


@dataclass(frozen=True, slots=True)
class Failures:
    """Of the rollouts of a step, or of an evaluation."""

    drawn: int  # rollouts that could have failed
    kinds: tuple[Kind, ...] = ()  # the most frequent first

    @classmethod
    def among(cls, groups: Sequence[RolloutGroup]) -> Failures:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        drawn = [rollout for rollout in rollouts if rollout.status is not RolloutStatus.PROMPT_TOO_LONG]
        first: dict[tuple[str, str], Rollout] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for rollout in drawn:
            if rollout.reward is None:
                kind = (rollout.status.value, (rollout.detail or "").partition(":")[0])
                counts[kind] += 1
                first.setdefault(kind, rollout)
        return cls(len(drawn), tuple(Kind(count, first[kind]) for kind, count in counts.most_common()))

    @property
    def count(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def share(self) -> float:
        return self.count / self.drawn if self.drawn else 0.0

    def check(self, max_share: float, where: str) -> None:
        """Raise FailureShareError, with the first traceback of each kind, when more than `max_share` failed."""
        if self.share <= max_share:
            return
        head = (
            f"{where}: {self.count} of {self.drawn} rollouts failed in the environment ({self.share:.0%};"
            f" environment.max_failure_share allows {max_share:.0%}); the first of each kind:"
        )
        shown = [_summary_of(kind) for kind in self.kinds[:_SHOWN_KINDS]]
        more = len(self.kinds) - len(shown)
        raise FailureShareError("\n\n".join([head, *shown, *([f"and {more} more kinds"] if more else [])]))


def _summary_of(kind: Kind) -> str:
    rollout = kind.first
    headline = f"{kind.count} x {rollout.status}, first in task {rollout.task.id}: {rollout.detail or 'no detail'}"
    lines = (rollout.trace or f"the completion was {rollout.text[:200]!r}").splitlines()
    return "\n".join([headline, *(f"    {line}" for line in lines)])
