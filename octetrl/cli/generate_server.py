"""The part of `octetrl generate` for a server's model: `octetrl generate NAME --base-url URL`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from octetrl.config.openai import OpenaiConfig, openai_problems
from octetrl.records import Completion
from octetrl.system.errors import UserError

BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        metavar="URL",
        help="Ask the server with OpenAI's API at this address, such as http://localhost:8000/v1.",
        show_default=False,
    ),
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option(
        "--api-key-variable",
        metavar="NAME",
        help="With --base-url: the environment variable that holds the key, such as OPENAI_API_KEY.",
        show_default=False,
    ),
]
InFlight = Annotated[
    int | None,
    typer.Option(
        "--in-flight",
        min=1,
        max=4096,
        help="With --base-url: number of requests at once. Default: 64.",
        show_default=False,
    ),
]
OPTIONS = {  # what a message calls a setting of a recipe: how this command spells it
    "engine.openai.base_url": "--base-url",
    "engine.openai.api_key_variable": "--api-key-variable",
    "engine.openai.model": "MODEL",
    "engine.openai: ": "--base-url: ",
    "rollout.max_new_tokens": "--max-new-tokens",
}


def server_config(model: str, base_url: str, api_key_variable: str | None, in_flight: int | None) -> OpenaiConfig:
    """The server's settings. Raises UserError."""
    if not model.strip():
        raise UserError("generate: MODEL is empty; with --base-url it is the model's name at the server")
    config = OpenaiConfig(
        base_url=base_url,
        model=model,
        answers="text",
        api_key_variable=api_key_variable,
        concurrency=in_flight or OpenaiConfig.model_fields["concurrency"].default,
    )
    for problem in openai_problems(config):
        raise UserError(_spelled(problem.text))
    return config


def spelled_as_options(answers: Iterable[Sequence[Completion]]) -> Iterator[list[Completion]]:
    """The same answers; failures and errors name this command's options instead of a recipe's fields."""
    try:
        for siblings in answers:
            yield [one if one.detail is None else replace(one, detail=_spelled(one.detail)) for one in siblings]
    except UserError as error:
        raise UserError(_spelled(str(error))) from None


def _spelled(text: str) -> str:
    for field, option in OPTIONS.items():
        text = text.replace(field, option)
    return text


def refuse_local(precision: str | None, cluster: Mapping[str, Any]) -> None:
    """Raise UserError for options of a model that is loaded here."""
    given = {"--precision": precision, **{f"--{name}": value for name, value in cluster.items() if value != "auto"}}
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name}: with --base-url no model is loaded here; leave it out")


def refuse_of_server(api_key_variable: str | None, in_flight: int | None) -> None:
    """Raise UserError for options of a server where none is named."""
    for name, value in (("--api-key-variable", api_key_variable), ("--in-flight", in_flight)):
        if value is not None:
            raise UserError(f"{name}: it is for a server; give its address as --base-url, or leave it out")
