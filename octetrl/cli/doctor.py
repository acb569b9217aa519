"""`octetrl doctor`: compares engine and trainer bit by bit, and names the first op that differs."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octetrl.cli.arguments import Overrides, RecipePath
from octetrl.cli.check_machine import backend_problems_here, find_device
from octetrl.config.cluster import one_worker
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import search_beside
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.doctor.examine import Examination

Prompts = Annotated[int, typer.Option(min=1, help="Number of prompts: the recipe's first tasks.")]
Sequences = Annotated[int, typer.Option(min=1, help="Answers to each prompt.")]
AnswerTokens = Annotated[int, typer.Option(min=2, help="Length of every answer.")]
Attribute = Annotated[
    bool, typer.Option("--attribute", help="Show which tensors cause the mismatch, with the share of each.")
]

Backend = Annotated[
    Literal["octetrl", "vllm"] | None,
    typer.Option(
        "--backend", help="Compare this engine with the trainer. Default: engine.backend.", show_default=False
    ),
]
Bound = Annotated[float, typer.Option("--bound", min=0.0, help="With vllm: say where a difference first exceeds this.")]

DIFFERING = 1


def doctor(
    recipe: RecipePath,
    overrides: Overrides = None,
    prompts: Prompts = 4,
    sequences: Sequences = 2,
    answer_tokens: AnswerTokens = 32,
    attribute: Attribute = False,
    backend: Backend = None,
    bound: Bound = 0.1,
) -> None:
    """Name the first op whose bits differ between engine and trainer; exit code 0 if none does, 1 if one does."""
    chosen = [] if backend is None else [f"engine.backend={backend}"]
    resolved = load_recipe(recipe, [*(overrides or []), *chosen])
    search_beside(recipe)
    if resolved.engine.backend != "octetrl":
        _on_other_engine(recipe, resolved, (prompts, sequences, answer_tokens), attribute=attribute, bound=bound)
        return
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
        alone = " ".join(one_worker(resolved.cluster))
        raise UserError(f"--attribute: it examines one worker; leave it out, or add {alone}")
    from octetrl.doctor.findings import examine_workers

    lines, equal = examine_workers(resolved, examination, os.path.abspath(recipe))
    for line in lines:
        typer.echo(line)
    if not equal:
        raise typer.Exit(DIFFERING)


def _on_other_engine(path: str, recipe: Recipe, size: tuple[int, int, int], *, attribute: bool, bound: float) -> None:
    """Say how far its log-probs are from the trainer's. Exit code 1 if a run would warn (`mismatch.warn_above`)."""
    for problem in backend_problems_here(recipe, find_device(recipe, None)):
        raise UserError(problem)
    from octetrl.doctor.examine import Examination
    from octetrl.doctor.other_engine import by_precision, precision_lines, summary_in_process, summary_of

    examination = Examination(*size)
    alone = partial(summary_in_process, os.path.abspath(path), examination, bound)
    found = alone(recipe) if attribute else summary_of(recipe, examination, bound)
    typer.echo(f"doctor: {found.title}; {recipe.engine.backend}, of which equality is not promised")
    for line in found.lines:
        typer.echo(line)
    if attribute:
        for line in precision_lines(by_precision(recipe, found, alone)):
            typer.echo(line)
    if not found.is_near:
        raise typer.Exit(DIFFERING)
