"""A server instead of workers: for an evaluation with `engine.backend: openai`. Nothing is loaded here.

It has the generating part of `Workers` (protocol.py), which is all that an evaluation calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octetrl.backends.openai.backend import OpenaiBackend
from octetrl.backends.openai.session import OpenaiSession
from octetrl.records import Completion, GenerationRequest, OnCompletions
from octetrl.rollout.backend import OnSession, SessionRecord, not_asked
from octetrl.telemetry.console import Console
from octetrl.workers.clock import Clock
from octetrl.workers.training_progress import most_tokens, rollout_shown


class ServerWorkers:
    """Generates with a server, and shows its progress."""

    needs_calibration = False

    def __init__(self, backend: OpenaiBackend, console: Console) -> None:
        self.backend = backend
        self._console, self._clock = console, Clock()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request. One without an answer has `finish_reason` FAILED."""
        with rollout_shown(self._console, most_tokens(requests)) as on_progress, self._clock("rollout") as took:
            drawn = self.backend.generate(requests, on_progress, on_completions)
        on_end(SessionRecord(took, self.backend.metrics))
        return drawn

    @contextmanager
    def session(self, on_end: OnSession = not_asked) -> Iterator[OpenaiSession]:
        shown = rollout_shown(self._console)
        with shown as on_progress, self._clock("rollout") as took, self.backend.session(on_progress) as session:
            yield session
        on_end(SessionRecord(took, self.backend.metrics))

    def forget_prefixes(self) -> None:
        """Nothing: a server decides on its own what it caches."""

    def close(self) -> None:
        self.backend.close()
