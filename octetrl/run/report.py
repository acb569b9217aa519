"""What a run says at its beginning and its end: a banner, a last line, and `report.html` in its folder."""

from __future__ import annotations

from pathlib import Path

from octetrl.config.errors import UserError
from octetrl.config.schema import Recipe
from octetrl.config.text import ESCAPE
from octetrl.telemetry.console import Console
from octetrl.telemetry.report_data import RunRecord, read_run
from octetrl.telemetry.report_page import report_page
from octetrl.telemetry.sinks import METRICS_FILE, last_step
from octetrl.workers.build import model_spec

REPORT = "report.html"


def leave_report(folder: Path, console: Console) -> None:
    """Writes the report if the run has finished a step. A report that can't be made is a warning: the run's results do
    not depend on it."""
    if not last_step(folder / METRICS_FILE):
        return
    try:
        (folder / REPORT).write_text(report_page([read_run(folder)]), encoding="utf-8", errors=ESCAPE)
    except (OSError, UserError, ValueError, TypeError, KeyError) as error:
        console.warn(f"no {REPORT} was written ({error}); `octetrl report {folder}` tries again")


def banner(recipe: Recipe, *, draws: bool) -> str:
    """What runs, in one line. `draws`: it samples answers."""
    settings = dict(RunRecord(Path(recipe.output_dir), recipe.model_dump(mode="json"), []).settings)
    model = f"{Path(settings['model']).name} ({_millions(model_spec(recipe).num_parameters)} parameters)"
    answers = recipe.rollout.prompts_per_step * recipe.rollout.group_size
    drawn = f"{answers} answers a step, " if draws else ""
    what = f"{model}, {settings['algorithm']}, {settings['precision']}"
    return f"{what}; {drawn}{recipe.steps} steps, in {recipe.output_dir}"


def _millions(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.1f}M" if number >= 1e5 else f"{number:,}"


def last_line(folder: Path) -> str:
    """What came out, and what to type next."""
    run = read_run(folder)
    best = max(run.series("eval/accuracy"), key=lambda one: one[2], default=None)
    told = "" if best is None else f"; best held-out accuracy {best[2]:.3f} at step {best[0]}"
    hours = run.hours[-1]
    spent = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min" if hours * 60 >= 2 else f"{hours * 3600:.0f} s"
    then = f"octetrl report {folder}, octetrl rollouts {folder}, octetrl serve {folder}"
    return f"done: {len(run.rows)} steps in {spent}{told}; {folder / REPORT}. Next: {then}"
