"""Writes a step's rollouts to a file, and computes the metrics that `learn` merges with the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octetrl.records import RolloutGroup
from octetrl.telemetry.failures import Failures
from octetrl.telemetry.rollouts import RolloutFiles, rollout_metrics


class Journal:
    """Call `record` once a step; `metrics` then belong to that step. `files` None: write no rollouts."""

    def __init__(self, files: RolloutFiles | None = None) -> None:
        self._files = files
        self._step = 0
        self.metrics: Mapping[str, float] = {}
        self.failures: dict[str, Failures] = {}  # of the step's rollouts, and of the evaluation after it

    def begin(self, step: int) -> None:
        self._step, self.metrics, self.failures = step, {}, {}

    def record(self, groups: Sequence[RolloutGroup], counts: Mapping[str, float] | None = None) -> None:
        """`counts`: further metrics of them."""
        if self._files is not None:
            self._files.write(self._step, groups)
        self.metrics = rollout_metrics(groups) | dict(counts or {})
        self.failures[f"step {self._step}"] = Failures.among(groups)
