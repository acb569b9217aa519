"""How long a phase may take on a worker, and the error of a worker that is lost.

The limit of a phase follows from its usual length: `times_usual` the longest so far, and at least `least_seconds`. A
phase that has not been measured has `first_seconds`, as it may compile kernels or load weights; one that computes
nothing has `least_seconds`.
"""

from __future__ import annotations

from octetrl.config.cluster import DeadlineConfig
from octetrl.system.errors import RunFailed

QUICK = ("state", "submit")


class WorkerLost(RunFailed):
    """A worker died, stalled or took too long. The run may go on with new workers, from its last checkpoint."""


class Deadlines:
    """The limits of a run's phases, by name."""

    def __init__(self, config: DeadlineConfig) -> None:
        self.config = config
        self._longest: dict[str, float] = {}

    def limit(self, phase: str) -> float:
        """Seconds that this phase may take now."""
        longest = self._longest.get(phase)
        if longest is None:
            return self.config.least_seconds if phase in QUICK else self.config.first_seconds
        return max(self.config.least_seconds, self.config.times_usual * longest)

    def took(self, phase: str, seconds: float) -> None:
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))
