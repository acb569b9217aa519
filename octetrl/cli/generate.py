"""`octetrl generate`: completions of one or several prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import typer

from octetrl.cli.arguments import Address, ChosenPrecision, Cpus, Device, Gpus, cluster_section
from octetrl.cli.generate_rows import prompt_of, read_rows, result_lines
from octetrl.config.errors import UserError
from octetrl.config.limits import MOST_COMPLETIONS
from octetrl.config.text import counted
from octetrl.records import Completion, SamplingParams
from octetrl.run.early import refuse_no_model

Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="JSON lines with prompt or messages, and n; - reads standard input. Completions are JSON lines too.",
    ),
]


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a run folder or one of its checkpoints.")
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="The user's message; may be given several times.", show_default=False),
    ] = None,
    rows: Input = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue each prompt without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens in a completion.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(max=1.0, help="Sample from the likeliest tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0: all.")] = 0,
    min_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Sample from tokens with at least this share of the top probability."),
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a completion; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="The same seed gives the same text.")] = 0,
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=MOST_COMPLETIONS, help="Completions of each prompt.")] = 1,
    precision: ChosenPrecision = None,
    device: Device = "auto",
    gpus: Gpus = None,
    cpus: Cpus = None,
    address: Address = None,
) -> None:
    """Generate text from a model or a run."""
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=_finite("--temperature", temperature),
        top_k=top_k,
        top_p=_finite("--top-p", top_p),
        min_p=_finite("--min-p", min_p),
        stop=tuple(stop or ()),
    )
    _check(sampling)
    if bool(prompt) == (rows is not None):
        raise UserError("generate: give prompts by --prompt, or a file of them by --input")
    given = read_rows(rows) if rows is not None else [{"prompt": text} for text in prompt or []]
    refuse_no_model(model)
    from octetrl.run.generate import generate_text

    completions = generate_text(
        model,
        [prompt_of(row) for row in given],
        sampling,
        precision=precision,
        cluster=cluster_section(device, gpus, cpus, address),
        seed=seed,
        n=[int(row.get("n", n)) for row in given],
        plain=plain,
        shows_progress=True,
    )
    for line in [completions_text(completions)] if rows is None else result_lines(given, completions):
        typer.echo(line)


def _check(sampling: SamplingParams) -> None:
    if sampling.top_p <= 0:
        raise UserError(f"--top-p: {sampling.top_p:g} would keep no token; give a number above 0 and at most 1")
    if "" in sampling.stop:
        raise UserError("--stop: an empty text would stop every completion at once; leave it out")


def completions_text(completions: Sequence[Sequence[Completion]]) -> str:
    """A single completion without a heading, for pipes. Several completions each have a line with prompt and number."""
    if len(completions) == 1 and len(completions[0]) == 1:
        return completions[0][0].text
    blocks = [
        f"--- prompt {which + 1}, completion {sibling + 1}: {counted(len(completion.token_ids), 'token')},"
        f" {completion.finish_reason}\n{completion.text}"
        for which, siblings in enumerate(completions)
        for sibling, completion in enumerate(siblings)
    ]
    return "\n".join(blocks)


def _finite(option: str, value: float) -> float:
    if not math.isfinite(value):
        raise UserError(f"{option}: {value} is not a finite number")
    return value
