"""The handle on a run's folder that `octetrl.train` returns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octetrl.api.llm import LLM, Prompt, RequestOutput
from octetrl.api.python_words import python_words
from octetrl.api.sampling import SamplingParams
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import Given
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.folder.layout import CHECKPOINTS, RECIPE_FILE, REPORT
from octetrl.run.folder.output_folder import read_run_id
from octetrl.run.hub import HubTarget, push_run
from octetrl.system.errors import UserError
from octetrl.system.text import ESCAPE, counted
from octetrl.telemetry.charts import escape
from octetrl.telemetry.eval_report import EvalReport
from octetrl.telemetry.notebook import Points, add_points, charts_html, framed, table_html
from octetrl.telemetry.report import report_page
from octetrl.telemetry.report_data import read_run, results
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS, rollout_files
from octetrl.telemetry.sinks import METRICS_FILE, read_objects
from octetrl.trainer.checkpoint import best_of, latest


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that reached its last step.

    Example:
        run = octetrl.train("demo_grpo")
        run.metrics[-1]["reward/mean"], run.evaluate().accuracy, run.export("models/mine")
        run.generate(["2+2="])[0].text, run.rollouts()[0]["text"], run.to_pandas()["reward/mean"].plot()
    """

    folder: Path  # config.yaml, metrics.jsonl, rollouts/, checkpoints/
    recipe: Recipe = field(repr=False)  # with every field resolved
    given: Given = field(repr=False)  # what the recipe names as `given:NAME`

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary for each step, as in metrics.jsonl: "step", "reward/mean", "time/step" in seconds, ..."""
        lines = (self.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def to_pandas(self) -> Any:
        """`metrics` as a pandas DataFrame, a row for each step. Raises UserError without pandas."""
        try:
            import pandas
        except ImportError:
            raise UserError(
                "FinishedRun.to_pandas: pandas is not installed; pip install pandas, or use `metrics`"
            ) from None
        return pandas.DataFrame(self.metrics).set_index("step")

    @property
    def best(self) -> Path:
        """The saved checkpoint with the best `checkpoint.best_metric`; the last one where none has it. A model for
        `LLM`, `train(model=...)` and every command."""
        folder = self.folder / CHECKPOINTS
        found = best_of(folder, read_run_id(self.folder), self.recipe.checkpoint.best_metric) or latest(folder)
        if found is None:
            raise UserError(f"FinishedRun.best: '{folder}' has no checkpoint; restore it, or train again")
        return found

    @python_words()
    def rollouts(self, step: int | None = None, *, held_out: bool = False) -> list[dict[str, Any]]:
        """The rollouts of a step (None: the last one), one dictionary each, siblings together: `prompt`, `text`,
        `reward` and the other fields of docs/evaluation.md. held_out: those of an evaluation's tasks."""
        files = dict(rollout_files(self.folder / (EVALUATIONS if held_out else ROLLOUTS)))
        chosen = max(files) if step is None else step
        if chosen not in files:
            raise UserError(
                f"FinishedRun.rollouts: step {step} has none; {counted(len(files), 'step')} from"
                f" {min(files)} to {max(files)} have"
            )
        return list(read_objects(files[chosen]))

    @python_words()
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Generate with the last checkpoint, as `LLM(run.folder).generate` does, which keeps the model for further
        calls. The precision is the run's."""
        llm = LLM(self.folder, precision=self.recipe.precision or "bf16", device=self.recipe.cluster.device)
        try:
            return llm.generate(prompts, sampling_params)
        finally:
            llm.close()

    @python_words()
    def report(self) -> Path:
        """Write the run's page, report.html in its folder, and return its path."""
        path = self.folder / REPORT
        path.write_text(report_page([read_run(self.folder)]), encoding="utf-8", errors=ESCAPE)
        return path

    def _repr_html_(self) -> str:
        """What a notebook shows: where the run is, what came out, and its curves."""
        run, points = read_run(self.folder), Points()
        for row in run.rows:
            add_points(points, row["step"], row)
        where = [("folder", str(self.folder)), ("report", str(self.folder / REPORT))]
        return framed(f"<div>{escape(run.name)}</div>", table_html([*results(run), *where]), charts_html(points))

    @python_words()
    def evaluate(self, *, all_tasks: bool = False, **evaluation: Any) -> EvalReport:
        """Evaluate the last checkpoint on the held-out tasks, or on all tasks.

        evaluation: fields of the recipe's section of that name, such as samples=4, temperature=1.0, k=(1, 4). The
        report has `accuracy` (None where no completion could be scored), `estimates` with 95% intervals, `metrics` and
        `groups`, which hold every completion. Raises UserError where no task is held out.
        """
        recipe = self.recipe
        if recipe.holds_out_rows and recipe.environment.dataset is None:
            raise UserError(
                "FinishedRun.evaluate: the run has no tasks; the loss of its held-out examples is in `metrics`"
            )
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

    @python_words()
    def push_to_hub(
        self,
        name: str,
        *,
        private: bool = False,
        revision: str | None = None,
        tag: str | None = None,
        base_model: str | None = None,
        adapter: bool = False,
        fp8: bool = False,
    ) -> str:
        """Upload the last checkpoint to the Hugging Face hub, with a model card; returns its address.

        name: the repository, which is created if needed. revision: a branch, made if needed. tag: set after the upload.
        base_model: for the card, the hub's name of the first model, if it was a local folder. The others as in
        `export`. Raises UserError without a token or a network."""
        target = HubTarget(name, private, revision, tag, base_model)
        return push_run(str(self.folder), None, target, adapter=adapter, fp8=fp8)
