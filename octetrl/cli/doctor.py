"""`octetrl doctor`: compares engine and trainer bit by bit, and names the first op that differs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import typer

from octetrl.cli.arguments import Overrides, RecipePath
from octetrl.cli.check_machine import backend_problems_here, find_device
from octetrl.config.in_words import one_worker
from octetrl.config.load import load_recipe
from octetrl.environments.python_object import search_beside
from octetrl.system.errors import UserError

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
    is_ours = resolved.engine.backend == "octetrl"
    if is_ours and resolved.cluster.uses_ray and attribute:
        alone = " ".join(one_worker(resolved.cluster))
        raise UserError(f"--attribute: it examines one worker; leave it out, or add {alone}")
    for problem in () if is_ours else backend_problems_here(resolved, find_device(resolved, None)):
        raise UserError(problem)
    from octetrl.doctor import attribution, examine, findings, other_engine  # they import torch

    examination, path = examine.Examination(prompts, sequences, answer_tokens), os.path.abspath(recipe)
    if not is_ours:
        in_process = partial(other_engine.summary_in_process, path, examination, bound)
        summary = in_process(resolved) if attribute else other_engine.summary_of(resolved, examination, bound)
        _show([f"doctor: {summary.title}; {resolved.engine.backend}, of which equality is not promised"])
        _show(summary.lines)
        if attribute:
            _show(other_engine.precision_lines(other_engine.by_precision(resolved, summary, in_process)))
        passes = summary.is_near
    elif resolved.cluster.uses_ray:
        lines, passes = findings.examine_workers(resolved, examination, path)
        _show(lines)
    else:
        subject = examine.ExaminedWorker(resolved, examination)
        _show([f"doctor: {subject}"])
        examined = findings.examine(subject)
        report = examined.report
        _show(findings.lines_of("forwards, against the trainer's packed one", report.passes))
        _show(findings.lines_of("log-probs, against those of the engine", report.ends))
        _show([report.verdict])
        if attribute:
            _show(attribution.attribute(examined).lines())
        passes = report.equal
    if not passes:
        raise typer.Exit(DIFFERING)


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)
