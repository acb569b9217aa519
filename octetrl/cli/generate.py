"""`octetrl generate`: completions of one or several prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from octetrl.cli.arguments import Address, ChosenPrecision, Cpus, Device, Gpus, cluster_section
from octetrl.cli.generate_answers import show_answers
from octetrl.cli.generate_rows import prompt_of, read_rows
from octetrl.cli.generate_server import (
    ApiKeyVariable,
    BaseUrl,
    InFlight,
    refuse_local,
    refuse_of_server,
    server_config,
    spelled_as_options,
)
from octetrl.cli.loading import loading_pytorch
from octetrl.config.limits import MOST_COMPLETIONS
from octetrl.config.schema import MOST_TEMPERATURE
from octetrl.records import Completion, SamplingParams
from octetrl.run.model_source import refuse_no_model
from octetrl.shapes.spec import MOST_TOKENS
from octetrl.system.errors import UserError

Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="JSON lines with prompt or messages, and n; - reads standard input. Completions are JSON lines too.",
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, RUN@STEP, RUN@best, a checkpoint, a Hugging Face folder or a name of the hub; with"
        " --base-url the server's name of it.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="The user's message; may be given several times.", show_default=False),
]
TopP = Annotated[float, typer.Option(max=1.0, help="Sample from the likeliest tokens with this total probability.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample from tokens with at least this share of the top probability.")
]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends a completion; may be given several times.")]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="The same seed gives the same text.")]
ForSft = Annotated[
    bool,
    typer.Option(
        "--for-sft",
        help="With --input: lines that algorithm.conversations reads. Truncated and failed answers are left out.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Largest number of tokens in a completion.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=MOST_TEMPERATURE, help="0 is greedy.")]
Plain = Annotated[bool, typer.Option("--plain", help="Continue each prompt without the chat template.")]


def generate(
    model: Model,
    prompt: Prompts = None,
    rows: Input = None,
    for_sft: ForSft = False,
    plain: Plain = False,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    stop: Stop = None,
    seed: Seed = 0,
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=MOST_COMPLETIONS, help="Completions of each prompt.")] = 1,
    precision: ChosenPrecision = None,
    device: Device = "auto",
    gpus: Gpus = None,
    cpus: Cpus = None,
    address: Address = None,
    base_url: BaseUrl = None,
    api_key_variable: ApiKeyVariable = None,
    in_flight: InFlight = None,
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
        raise UserError(
            "generate: give prompts by --prompt, or JSON lines by --input FILE; --input - reads them from a pipe"
        )
    if for_sft and (rows is None or plain):
        raise UserError("--for-sft: it writes the lines of --input with their answers, as the chat template has them")
    given = read_rows(rows) if rows is not None else [{"prompt": text} for text in prompt or []]
    prompts, counts = [prompt_of(row) for row in given], [int(row.get("n", n)) for row in given]
    cluster = cluster_section(device, gpus, cpus, address)
    if base_url is None:
        refuse_of_server(api_key_variable, in_flight)
        refuse_no_model(model)
        with loading_pytorch():
            from octetrl.run.generate import generate_text

        answers: Iterable[Sequence[Completion]] = generate_text(
            model, prompts, sampling, precision=precision, cluster=cluster, seed=seed, n=counts, plain=plain,
            shows_progress=True,
        )  # fmt: skip
    else:
        refuse_local(precision, cluster)
        server = server_config(model, base_url, api_key_variable, in_flight)
        from octetrl.run.server_generate import generate_by_server

        drawn = generate_by_server(server, prompts, sampling, n=counts, seed=seed, plain=plain)
        answers = spelled_as_options(drawn)
    show_answers(given, answers, as_rows=rows is not None, for_sft=for_sft)


def _check(sampling: SamplingParams) -> None:
    if sampling.top_p <= 0:
        raise UserError(f"--top-p: {sampling.top_p:g} would keep no token; give a number above 0 and at most 1")
    if "" in sampling.stop:
        raise UserError("--stop: an empty text would stop every completion at once; leave it out")


def _finite(option: str, value: float) -> float:
    if not math.isfinite(value):
        raise UserError(f"{option}: {value} is not a finite number")
    return value
