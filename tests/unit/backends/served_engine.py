"""The HTTP server of `octetrl serve` around an engine of a test, on a free port, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from octetrl.engine.engine import Engine
from octetrl.engine.stopping import decoder_of
from octetrl.server.answers import Speller
from octetrl.server.engine_thread import EngineThread
from octetrl.server.intake import Intake
from octetrl.server.meters import Meters
from octetrl.server.prompts import Prompts
from tests.e2e.official_client import uvicorn
from tests.unit.backends.setting import CONTEXT_LENGTH, SPEC, Letters

NAME = "tiny"


@contextmanager
def served_engine(engine: Engine, *, api_key: str | None = None) -> Iterator[str]:
    """The address of the server, with /v1."""
    # only now: where Starlette is missing, official_client says so
    from octetrl.server.app import make_app
    from octetrl.server.endpoints import Served

    intake = Intake(EngineThread(engine.session), capacity=64)
    served = Served(
        name=NAME,
        context_length=CONTEXT_LENGTH,
        prompts=Prompts(Letters(), vocab_size=SPEC.vocab_size, context_length=CONTEXT_LENGTH),
        intake=intake,
        meters=Meters(intake),
        decode=decoder_of(Letters()),
        spell=Speller(Letters()),
    )
    app = make_app(served, api_key=api_key, max_body_bytes=1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="error", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
