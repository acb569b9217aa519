"""Builds, runs and ends the server of `octetrl serve`. The rest of this folder is the HTTP side.

build   weights, scales of a calibrated cache, engine, app
run     uvicorn on one socket, the engine in a thread of its own
end     the first SIGTERM or Ctrl-C: new requests get 503, current ones have `drain_seconds` to finish or get an error,
        and the process ends, after SIGTERM with exit code 0; the second: at once
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from octetrl.config.schema import ClusterConfig
from octetrl.engine.stopping import decoder_of
from octetrl.run.device import gpus_beside
from octetrl.run.generate import CALIBRATION_TEXTS, load_standing_model
from octetrl.server.address import bound, is_of_this_machine, url_of
from octetrl.server.answers import Speller
from octetrl.server.app import make_app, show_access_log
from octetrl.server.endpoints import Served
from octetrl.server.engine_thread import EngineThread
from octetrl.server.http_server import AFTER_DRAIN_SECONDS, Server
from octetrl.server.intake import Intake
from octetrl.server.meters import Meters
from octetrl.server.prompts import Prompts
from octetrl.system.errors import UserError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    model: str  # a Hugging Face folder, a run folder or a checkpoint
    name: str | None = None  # under which it is asked for; None: the folder's
    precision: str | None = "bf16"  # None: as the run was trained
    cluster: Mapping[str, Any] = field(default_factory=dict)  # a recipe's section; several workers are replicas
    context_length: int | None = None  # None: the run's; of a model that is no run, its own, at most CONTEXT_LENGTH
    kv_cache_tokens: int | None = None
    chat_template: str | None = None  # a file in place of the tokenizer's template
    tool_format: str | None = None  # of the model's tool calls; None: the run's, or by the chat template
    max_batch: int = 256
    max_queue: int = 256  # completions that wait
    max_body_bytes: int = 8 << 20
    api_key: str | None = None
    without_key: bool = False  # every machine that reaches the host may send requests
    origins: Sequence[str] = ()  # web pages that may call it from a browser
    access_log: bool = False  # a line for each request
    calibration_texts: Sequence[str] = CALIBRATION_TEXTS


def serve(options: ServeOptions, *, host: str, port: int, drain_seconds: float, say: Callable[[str], None]) -> None:
    """Serves until a signal comes. Raises UserError for problems that the user can correct, KeyboardInterrupt after
    Ctrl-C."""
    _check_key(options, host)
    if options.access_log:
        show_access_log()
    with bound(host, port) as listening:
        app, intake = build_app(options)
        count = gpus_beside(ClusterConfig(**options.cluster))
        if count > 1:
            say(f"this server uses one of {count} GPUs; to use all, add --gpus {count}")
        place = url_of(host, listening.getsockname()[1])
        interrupted = asyncio.run(_run(app, intake, listening, drain_seconds, partial(say, f"serving at {place}")))
    if interrupted:
        raise KeyboardInterrupt


def build_app(options: ServeOptions) -> tuple[Starlette, Intake]:
    """The app; its engine starts with it."""
    loaded = load_standing_model(
        options.model,
        precision=options.precision,
        cluster=options.cluster,
        context_length=options.context_length,
        kv_cache_tokens=options.kv_cache_tokens,
        max_batch=options.max_batch,
        chat_template=options.chat_template,
        calibration_texts=options.calibration_texts,
        spelled=lambda name: f"--{name.replace('_', '-')}",
    )
    context_length = loaded.context_length
    running = options.max_batch * loaded.cluster.num_workers
    intake = Intake(EngineThread(loaded.session, loaded.close), capacity=running + options.max_queue)
    own = deepcopy(loaded.tokenizer)  # the engine's thread has the other one
    served = Served(
        name=options.name or Path(options.model).resolve().name,
        context_length=context_length,
        prompts=Prompts(
            own,
            vocab_size=loaded.vocab_size,
            context_length=context_length,
            variables=loaded.variables,
            tool_format=options.tool_format or loaded.tool_format,
            ends=loaded.eos_token_ids,
        ),
        intake=intake,
        meters=Meters(intake),
        decode=decoder_of(own),
        spell=Speller(own),
    )
    app = make_app(
        served,
        api_key=options.api_key,
        max_body_bytes=options.max_body_bytes,
        origins=options.origins,
        access_log=options.access_log,
    )
    return app, intake


def _check_key(options: ServeOptions, host: str) -> None:
    """Refuses to serve other machines without a key, unless `--without-key` was given."""
    if options.without_key and options.api_key is not None:
        raise UserError("--without-key: an API key was given as well; leave one out (OCTETRL_API_KEY is a key too)")
    if options.api_key is None and not options.without_key and not is_of_this_machine(host):
        raise UserError(
            f"--host: '{host}' allows access from other machines without an API key; set OCTETRL_API_KEY, listen on"
            " 127.0.0.1, or give --without-key if something else keeps strangers out"
        )


async def _run(
    app: Starlette, intake: Intake, listening: socket.socket, drain_seconds: float, ready: Callable[[], None]
) -> bool:
    """Runs the server. Returns whether Ctrl-C ended it."""
    server = Server(app, intake, listening, drain_seconds, ready)
    try:
        await server.serve(sockets=[listening])
    finally:
        intake.engine.stop(AFTER_DRAIN_SECONDS)  # uvicorn leaves it out when it ends at once
    if not server.started:
        raise RuntimeError("the server could not start; its log says why")
    return server.interrupted
