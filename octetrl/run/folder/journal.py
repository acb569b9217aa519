"""Writes the rollouts of a step and of the evaluation after it to files, and computes their metrics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.config.several_environments import section_name
from octetrl.records import RolloutGroup
from octetrl.rollout.samples import TrainedRollout
from octetrl.telemetry.rollout_metrics import Failures, by_environment, environment_metrics, rollout_metrics
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS, RolloutFiles


class Journal:
    """`files` None: write no rollouts; `evaluations` likewise, of held-out tasks. `environments`: names of several, for
    metrics of each. `right_from`: as in the recipe's `evaluation`."""

    def __init__(
        self,
        files: RolloutFiles | None = None,
        evaluations: RolloutFiles | None = None,
        *,
        environments: Collection[str] = (),
        right_from: float = 1.0,
    ) -> None:
        self._files, self._evaluations = files, evaluations
        self._environments, self._right_from = environments, right_from

    @classmethod
    def of(cls, recipe: Recipe, run_folder: Path | None = None, resumed_step: int = 0) -> Journal:
        """A run's journal: `rollouts/`, and `evaluations/` if there are any. Removes those after `resumed_step`.

        run_folder: None to write none."""
        files = held_out = None
        if run_folder is not None:
            evaluations = run_folder / EVALUATIONS
            evaluates = recipe.evaluation.every > 0 or recipe.evaluation.on_start or evaluations.is_dir()
            files = RolloutFiles(run_folder / ROLLOUTS, resumed_step)
            held_out = RolloutFiles(evaluations, resumed_step) if evaluates else None
        right_from = recipe.evaluation.right_from
        return cls(files, held_out, environments=tuple(recipe.environments), right_from=right_from)

    def record(self, step: int, groups: Sequence[RolloutGroup], trained: Sequence[TrainedRollout]) -> dict[str, float]:
        """Writes the groups of a step, with the advantages of the rollouts that are trained on. Returns their
        metrics."""
        if self._files is not None:
            self._files.write(step, groups, {id(one.rollout): one.advantage for one in trained})
        return rollout_metrics(groups) | environment_metrics(groups, self._environments, self._right_from)

    def record_evaluation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes the groups of the held-out tasks, evaluated after `step`."""
        if self._evaluations is not None:
            self._evaluations.write(step, groups)


def check_failures(recipe: Recipe, groups: Sequence[RolloutGroup], where: str) -> None:
    """Raises RunFailed if more rollouts of an environment failed than it allows. where: begins the message."""
    if not recipe.environments:
        Failures.among(groups).check(recipe.environment.max_failure_share, where)
        return
    for name, of_name in by_environment(groups).items():
        limit, field = recipe.environments[name].max_failure_share, f"{section_name(name)}.max_failure_share"
        Failures.among(of_name).check(limit, f"{where}, {name}", field)


NO_FILES = Journal()
