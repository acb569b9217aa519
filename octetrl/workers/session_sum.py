"""The metrics of a step's sessions as one: filters that refill a step generate several times."""

from __future__ import annotations

from octetrl.rollout.backend import GenerationMetrics


class SessionSum:
    """Joins the metrics of sessions that run one after another, until they are taken."""

    def __init__(self) -> None:
        self._sum: GenerationMetrics | None = None

    def add(self, session: GenerationMetrics | None) -> None:
        """None: the engine does not count."""
        if session is not None:
            self._sum = session if self._sum is None else self._sum.followed_by(session)

    def take(self, *, scales_are_calibrated: bool) -> dict[str, float]:
        """By the names of a step's metrics. Empty if no session was added since the last call."""
        taken, self._sum = self._sum, None
        return {} if taken is None else taken.named(scales_are_calibrated=scales_are_calibrated)
