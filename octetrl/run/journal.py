"""Writes the rollouts of a step and of the evaluation after it to files, and computes the metrics that `learn` merges
with the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from octetrl.records import RolloutGroup
from octetrl.telemetry.failures import Failures
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS, RolloutFiles, rollout_metrics

STEP, EVALUATION = "rollouts", "evaluation"


class Journal:
    """Call `record` once a step; `metrics` then belong to that step. `files` None: write no rollouts; `evaluations`
    likewise, of held-out tasks."""

    def __init__(self, files: RolloutFiles | None = None, evaluations: RolloutFiles | None = None) -> None:
        self._files, self._evaluations = files, evaluations
        self._step = 0
        self.metrics: Mapping[str, float] = {}
        self.failures: dict[str, Failures] = {}  # of the step's rollouts, and of the evaluation after it
        self.samples: dict[str, Sequence[RolloutGroup]] = {}  # likewise, by the name under which they are shown

    @classmethod
    def in_folder(cls, run_folder: Path, resumed_step: int, *, evaluates: bool) -> Journal:
        """The files of a run: `rollouts/`, and `evaluations/` if there are any. Removes those after `resumed_step`."""
        evaluations = run_folder / EVALUATIONS
        held_out = RolloutFiles(evaluations, resumed_step) if evaluates or evaluations.is_dir() else None
        return cls(RolloutFiles(run_folder / ROLLOUTS, resumed_step), held_out)

    def begin(self, step: int) -> None:
        self._step, self.metrics, self.failures, self.samples = step, {}, {}, {}

    def record(self, groups: Sequence[RolloutGroup], counts: Mapping[str, float] | None = None) -> None:
        """`counts`: further metrics of them."""
        if self._files is not None:
            self._files.write(self._step, groups)
        self.metrics = rollout_metrics(groups) | dict(counts or {})
        self.failures[f"step {self._step}"] = Failures.among(groups)
        self.samples[STEP] = groups

    def record_evaluation(self, groups: Sequence[RolloutGroup]) -> None:
        """Of the held-out tasks, after the step."""
        if self._evaluations is not None:
            self._evaluations.write(self._step, groups)
        self.failures[f"evaluation after step {self._step}"] = Failures.among(groups)
        self.samples[EVALUATION] = groups
