"""Rollouts that failed in their environment: their share, and the first traceback of each kind.

A rollout failed if it was sampled and has no reward: the reward or the environment raised, or exceeded a time limit. A
prompt that is too long is no failure, because nothing was sampled. A wrong answer is no failure, because it has a
reward.

Single failures are normal: they are left out of training and counted. If most rollouts fail, the run would learn from
the few others, so it stops (`environment.max_failure_share`).

Failures with the same status and type of error are of the same kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octetrl.records import Rollout, RolloutGroup, RolloutStatus
from octetrl.system.errors import RunFailed

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
    """Failures among the rollouts of a step or an evaluation."""

    drawn: int  # number of sampled rollouts
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

    def check(self, max_share: float, where: str, field: str = "environment.max_failure_share") -> None:
        """Raise FailureShareError, with the first traceback of each kind, if more than `max_share` failed. field: the
        recipe's field with this limit."""
        if self.share <= max_share:
            return
        head = (
            f"{where}: {self.count} of {self.drawn} rollouts failed in the environment ({self.share:.0%};"
            f" {field} allows {max_share:.0%}); the first failure of each kind:"
        )
        shown = [_summary_of(kind) for kind in self.kinds[:_SHOWN_KINDS]]
        more = len(self.kinds) - len(shown)
        raise FailureShareError("\n\n".join([head, *shown, *([f"and {more} more kinds"] if more else [])]))


def _summary_of(kind: Kind) -> str:
    rollout = kind.first
    headline = f"{kind.count} x {rollout.status}, first in task {rollout.task.id}: {rollout.detail or 'no detail'}"
    lines = (rollout.trace or f"the completion was {rollout.text[:200]!r}").splitlines()
    return "\n".join([headline, *(f"    {line}" for line in lines)])
