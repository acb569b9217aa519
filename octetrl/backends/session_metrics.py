"""What the metrics of sessions with other engines have in common: totals, and the sum of several sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMetrics:
    """Metrics of one session, or of several. Preemptions and clamped K and V values are 0 where the engine does not
    say."""

    completions: int
    generated_tokens: int
    seconds: float
    batch_occupancy: float  # mean share of the largest batch that ran
    idle_share: float
    preemptions: int = 0
    kv_saturation: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def merged(self, others: Sequence[Self]) -> Self:
        """These and those of sessions that ran at the same time."""
        every = [self, *others]
        return self.joined(every, max(one.seconds for one in every))

    def followed_by(self, later: Self) -> Self:
        """These and those of a session that ran afterwards."""
        return self.joined([self, later], self.seconds + later.seconds)

    def joined(self, every: Sequence[Self], seconds: float) -> Self:
        """Shares are means, weighted by the seconds of their sessions."""
        whole = sum(one.seconds for one in every) or 1.0
        return replace(
            self,
            completions=sum(one.completions for one in every),
            generated_tokens=sum(one.generated_tokens for one in every),
            seconds=seconds,
            batch_occupancy=sum(one.batch_occupancy * one.seconds for one in every) / whole,
            idle_share=sum(one.idle_share * one.seconds for one in every) / whole,
        )
