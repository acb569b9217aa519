"""A server on a free port, in this process, around the tiny model; and a model that says what a test wants said."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.e2e.official_client import openai, uvicorn  # first: it skips a module that lacks the server's packages

# isort: split
from octetrl.server.intake import Intake
from octetrl.server.serve import ServeOptions, build_app

CONTEXT_LENGTH = 512


class Live:
    """A running server for the model in `folder`. `engine` is the Engine behind it; None: there are several."""

    def __init__(self, url: str, folder: Path, intake: Intake, engine: Any) -> None:
        self.url, self.folder, self.intake, self.engine = url, folder, intake, engine

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def until(self, holds: Any, seconds: float = 60.0) -> None:
        """Waits until `holds()`; fails when it does not come."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.005)

    @property
    def pages_in_use(self) -> int:
        return self.intake.engine.pages_in_use

    def until_idle(self) -> None:
        self.until(lambda: self.intake.num_completions == 0 and self.pages_in_use == 0)
        session = self.intake.engine._session
        assert session is not None and not session.has_work
        session._scheduler.check()


@contextmanager
def live_server(model: Path, **options: Any) -> Iterator[Live]:
    options = {"cluster": {"device": "cpu"}, "context_length": CONTEXT_LENGTH, "name": "tiny", **options}
    app, intake = build_app(ServeOptions(str(model), **options))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="error", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.005)
            loaded = intake.engine._open_session.__self__._workers  # type: ignore[attr-defined]
            engine = loaded.worker and loaded.worker.engine
            yield Live(f"http://127.0.0.1:{listening.getsockname()[1]}", model, intake, engine)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive() and not intake.engine.is_alive


@contextmanager
def saying(engine: Any, token_ids: Sequence[int]) -> Iterator[None]:
    """Every request, one at a time, draws these tokens."""
    runner = engine._runner
    model, place = runner.model, 0

    class Scripted:
        group = model.group

        def __call__(self, *inputs: Any) -> torch.Tensor:
            return model(*inputs)

        def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
            nonlocal place
            logits_NV = torch.full_like(model.logits(hidden_NE), -100.0)
            logits_NV[:, token_ids[place % len(token_ids)]] = 100.0
            place += 1
            return logits_NV

    runner.model = Scripted()
    try:
        yield
    finally:
        runner.model = model


@contextmanager
def held(engine: Any) -> Iterator[threading.Event]:
    """Forwards wait until the event is set."""
    gate, runner = threading.Event(), engine._runner
    launch = runner.launch

    def wait(*inputs: Any) -> Any:
        assert gate.wait(120)
        return launch(*inputs)

    runner.launch = wait
    try:
        yield gate
    finally:
        gate.set()
        runner.launch = launch
