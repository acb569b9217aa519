"""`octetrl eval`: accuracy of a run or a model on the held-out tasks of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from octetrl.cli.arguments import Overrides
from octetrl.config.errors import UserError
from octetrl.config.load import load_recipe

if TYPE_CHECKING:
    from octetrl.run.evaluate import EvalReport


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a checkpoint or a Hugging Face folder.")
    ],
    recipe: Annotated[str, typer.Option("--recipe", "-r", metavar="R", help="Whose environment and lengths to use.")],
    overrides: Overrides = None,
) -> None:
    """Evaluate a run or a model by a recipe's held-out tasks."""
    resolved = load_recipe(recipe, overrides or [], training=False)
    if not resolved.environment.eval_size:
        raise UserError(f"{recipe}: environment.eval_size is 0, so no task is held out; set it above 0")
    from octetrl.run.evaluate import evaluate_checkpoint

    typer.echo(report_text(evaluate_checkpoint(target, resolved)))


def report_text(report: EvalReport) -> str:
    """The report as aligned lines."""
    accuracy = "none: no completion could be scored" if report.accuracy is None else f"{report.accuracy:.4f}"
    lines = [("accuracy", accuracy), ("tasks", f"{report.tasks:,}")]
    lines += [(str(status), f"{count:,}") for status, count in report.counts.items()]
    lines += [("mean length", f"{report.mean_length:.1f}"), ("tokens/s", f"{report.tokens_per_second:,.0f}")]
    return "\n".join(f"{name:<16}{value}" for name, value in lines)
