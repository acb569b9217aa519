"""The handle on a run's folder that `octetrl.train` returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octetrl.api.python_words import python_words
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import Given
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.folder.layout import RECIPE_FILE
from octetrl.telemetry.eval_report import EvalReport
from octetrl.telemetry.sinks import METRICS_FILE


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that reached its last step.

    Example:
        run = octetrl.train("demo_grpo")
        run.metrics[-1]["reward/mean"], run.evaluate().accuracy, run.export("models/mine")
    """

    folder: Path  # config.yaml, metrics.jsonl, rollouts/, checkpoints/
    recipe: Recipe = field(repr=False)  # with every field resolved
    given: Given = field(repr=False)  # what the recipe names as `given:NAME`

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary for each step, as in metrics.jsonl: "step", "reward/mean", "time/step" in seconds, ..."""
        lines = (self.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @python_words()
    def evaluate(self, *, all_tasks: bool = False, **evaluation: Any) -> EvalReport:
        """Evaluate the last checkpoint on the held-out tasks, or on all tasks.

        evaluation: fields of the recipe's section of that name, such as samples=4, temperature=1.0, k=(1, 4). The
        report has `accuracy` (None where no completion could be scored), `estimates` with 95% intervals, `metrics` and
        `groups`, which hold every completion. Raises UserError where no task is held out.
        """
        recipe = self.recipe
        if evaluation:
            fields: Mapping[str, Any] = {"evaluation": evaluation}
            recipe = load_recipe(self.folder / RECIPE_FILE, fields=dict(fields), training=False)
        return evaluate_checkpoint(str(self.folder), recipe, all_tasks=all_tasks, given=self.given)

    @python_words()
    def export(self, to: str | Path, *, adapter: bool = False, fp8: bool = False) -> Path:
        """Write the last checkpoint to the new folder `to` in Hugging Face format; returns the folder.

        adapter: of a run with LoRA, the adapter in PEFT's format instead of the merged model. fp8: the linears as
        block-FP8 (E4M3 codes, scales of 128 x 128 blocks), as published FP8 models are. Raises UserError where `to` is
        not empty, or the model has no FP8 form: an adapter alone, a reward model, widths other than multiples of 128.
        """
        return export_run(str(self.folder), str(to), adapter=adapter, fp8=fp8)
