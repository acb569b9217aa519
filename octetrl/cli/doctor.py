"""`octetrl doctor`: compares engine and trainer bit by bit, and names the first op that differs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from octetrl.cli.arguments import Overrides, RecipePath
from octetrl.config.errors import UserError
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import search_beside

if TYPE_CHECKING:
    from octetrl.doctor.examine import Examination

Prompts = Annotated[int, typer.Option(min=1, help="Number of prompts: the recipe's first tasks.")]
Sequences = Annotated[int, typer.Option(min=1, help="Answers to each prompt.")]
AnswerTokens = Annotated[int, typer.Option(min=2, help="Length of every answer.")]
Attribute = Annotated[
    bool, typer.Option("--attribute", help="Show which tensors cause the mismatch, with the share of each.")
]

DIFFERING = 1


def doctor(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompts: Prompts = 4,
    sequences: Sequences = 2,
    answer_tokens: AnswerTokens = 32,
    attribute: Attribute = False,
) -> None:
    """Name the first op whose bits differ between engine and trainer; exit code 0 if none does, 1 if one does."""
    resolved = load_recipe(recipe, overrides or [])
    search_beside(recipe)
    from octetrl.doctor.examine import Examination, ExaminedWorker
    from octetrl.doctor.findings import examine, lines_of

    examination = Examination(prompts, sequences, answer_tokens)
    if resolved.cluster.uses_ray:
        _on_workers(recipe, resolved, examination, attribute=attribute)
        return
    subject = ExaminedWorker(resolved, examination)
    typer.echo(f"doctor: {subject}")
    examined = examine(subject)
    report = examined.report
    for line in lines_of("forwards, against the trainer's packed one", report.passes):
        typer.echo(line)
    for line in lines_of("log-probs, against those of the engine", report.ends):
        typer.echo(line)
    typer.echo(report.verdict)
    if attribute:
        from octetrl.doctor.attribution import attribute as attribution_of

        for line in attribution_of(examined).lines():
            typer.echo(line)
    if not report.equal:
        raise typer.Exit(DIFFERING)


def _on_workers(recipe: str, resolved: Recipe, examination: Examination, *, attribute: bool) -> None:
    if attribute:
        raise UserError("--attribute: it examines one worker; leave it out, or remove cluster.gpus and cluster.cpus")
    from octetrl.doctor.many import examine_workers

    lines, equal = examine_workers(resolved, examination, os.path.abspath(recipe))
    for line in lines:
        typer.echo(line)
    if not equal:
        raise typer.Exit(DIFFERING)
