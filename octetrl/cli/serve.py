"""`octetrl serve`: a model behind an OpenAI-compatible HTTP server (docs/server.md)."""

from __future__ import annotations

import os
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octetrl.cli.arguments import Address, ChatTemplate, ChosenPrecision, Cpus, Device, Gpus, cluster_section
from octetrl.cli.output import loading_pytorch
from octetrl.config.schema import ToolFormatName
from octetrl.run.model_source import precision_of, refuse_no_model
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.server.serve import ServeOptions

WithoutKey = Annotated[
    bool,
    typer.Option("--without-key", help="Allow other machines without a key, behind a proxy that checks clients."),
]
CalibrateOn = Annotated[
    Path | None,
    typer.Option(
        help="Texts, one per line, from which the scales of a calibrated FP8 cache are measured; default: built in."
    ),
]

AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Web page that may call the server from a browser, e.g. https://chat.example; '*': any."),
]
ToolFormat = Annotated[
    ToolFormatName | None,
    typer.Option(help="Format of the model's tool calls; default: the run's, or by the chat template."),
]
ContextLength = Annotated[
    int | None,
    typer.Option(min=16, help="Tokens of prompt and answer at most; default: the run's, or a model's up to 8192."),
]
MaxQueue = Annotated[int, typer.Option(min=0, help="Largest number of waiting completions; more are refused (429).")]
AccessLog = Annotated[bool, typer.Option("--access-log", help="Write a line for each request to standard error.")]

Served = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, RUN@STEP, RUN@best, a checkpoint, a Hugging Face folder or a name of the hub.",
    ),
]


def serve(
    model: Served,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: every one, with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; default: the folder's name.")] = None,
    precision: ChosenPrecision = None,
    device: Device = "auto",
    gpus: Gpus = None,
    cpus: Cpus = None,
    address: Address = None,
    context_length: ContextLength = None,
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(min=16, help="Capacity of each worker's KV cache; default: most of the GPU's free memory."),
    ] = None,
    chat_template: ChatTemplate = None,
    tool_format: ToolFormat = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Largest number of completions generated together on a worker.")
    ] = 256,
    max_queue: MaxQueue = 256,
    max_body_mb: Annotated[float, typer.Option(min=0.001, max=1e6, help="Largest request body, MB (413).")] = 8.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OCTETRL_API_KEY", help="Key that clients must send. ps shows the option, but not the variable."
        ),
    ] = None,
    without_key: WithoutKey = False,
    allow_origin: AllowOrigin = None,
    access_log: AccessLog = False,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="Time for running requests after SIGTERM.")] = 30.0,
    calibrate_on: CalibrateOn = None,
) -> None:
    """Serve a model with OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics."""
    _refuse_early(model, api_key)
    with loading_pytorch():
        from octetrl.server import serve as run

    options = run.ServeOptions(
        model,
        name=name,
        precision=precision,
        cluster=cluster_section(device, gpus, cpus, address),
        context_length=context_length,
        kv_cache_tokens=kv_cache_tokens,
        chat_template=chat_template,
        tool_format=tool_format,
        max_batch=max_batch,
        max_queue=max_queue,
        max_body_bytes=int(max_body_mb * 1e6),
        api_key=api_key,
        without_key=without_key,
        origins=tuple(allow_origin or ()),
        access_log=access_log,
        calibration_texts=run.CALIBRATION_TEXTS if calibrate_on is None else _texts(calibrate_on),
    )
    if without_key and api_key is None:
        typer.echo(f"warning: anyone who can reach {host}:{port} can use this server, as it asks for no key", err=True)
    run.serve(options, host=host, port=port, drain_seconds=drain_seconds, say=partial(_say, options))


def _refuse_early(model: str, api_key: str | None) -> None:
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise UserError(f"octetrl serve needs the package '{package}'; pip install 'octetrl[serve]'")
    refuse_no_model(model)
    if api_key == "":
        raise UserError("the API key is empty, so every client would have it; give one, or unset OCTETRL_API_KEY")
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise UserError(
            "the API key has a blank or a character that is not ASCII, so no client could send it in a header; give"
            " one of printable ASCII characters"
        )


def _say(options: ServeOptions, text: str) -> None:
    """Show a line of the server. `serving at URL` gets the precision, and a request to try in the next line. The key
    itself is not shown."""
    _, serves, url = text.partition("serving at ")
    if not serves:
        typer.echo(text, err=True)
        return
    name, of_run = precision_of(options.model, options.precision)
    typer.echo(f"{text} ({name or 'FP8'}{', as the run' if of_run else ''})", err=True)
    body = """'{"messages": [{"role": "user", "content": "Hello"}]}'"""
    variable = "$OCTETRL_API_KEY" if os.environ.get("OCTETRL_API_KEY") == options.api_key else "KEY"
    key = f' -H "Authorization: Bearer {variable}"' if options.api_key is not None else ""
    typer.echo(f"try: curl {url}/chat/completions{key} -H 'Content-Type: application/json' -d {body}", err=True)


def _texts(path: Path) -> list[str]:
    try:
        texts = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        raise UserError(f"--calibrate-on: '{path}' can't be read as text ({reason}); give a UTF-8 file") from error
    if not texts:
        raise UserError(f"--calibrate-on: '{path}' has no text; give prompts, one a line")
    return texts
