"""A server instead of workers: for an evaluation with `engine.backend: openai`. Nothing is loaded here.

It has the generating part of `Workers` (protocol.py), which is all that an evaluation calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octetrl.backends.openai.backend import OpenaiBackend
from octetrl.backends.openai.session import OpenaiSession
from octetrl.records import Completion, GenerationRequest, OnCompletions
from octetrl.telemetry.console import Console
from octetrl.workers.session_sum import SessionSum
from octetrl.workers.training_progress import most_tokens, rollout_shown


class ServerWorkers:
    """Generates with a server, and shows its progress."""

    needs_calibration = False

    def __init__(self, backend: OpenaiBackend, console: Console) -> None:
        self.backend = backend
        self._console = console
        self._sessions = SessionSum()

    def generate(
        self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request. One without an answer has `finish_reason` FAILED."""
        with rollout_shown(self._console, most_tokens(requests)) as on_progress:
            drawn = self.backend.generate(requests, on_progress, on_completions)
        self._sessions.add(self.backend.metrics)
        return drawn

    @contextmanager
    def session(self) -> Iterator[OpenaiSession]:
        with rollout_shown(self._console) as on_progress, self.backend.session(on_progress) as session:
            yield session
        self._sessions.add(self.backend.metrics)

    def forget_prefixes(self) -> None:
        """Nothing: a server decides on its own what it caches."""

    def rollout_metrics(self) -> dict[str, float]:
        return self._sessions.take(scales_are_calibrated=False)

    def close(self) -> None:
        self.backend.close()
