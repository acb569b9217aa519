"""An open session with a server: requests in, events out. A sibling is one HTTP request, in a thread of its own.

`concurrency` threads send requests and wait; the caller's thread receives what they got. The threads are daemons: a
Ctrl-C does not wait for a server that is still generating. An answer comes whole, so a request that streams has a
single event.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octetrl.backends.one_session import AdapterSession, SessionMetrics
from octetrl.backends.openai.answers import STAMP, NoAnswer, ask, check_sampling, read
from octetrl.config.schema import OpenaiConfig
from octetrl.endpoint import Endpoint
from octetrl.engine.admission import Admission
from octetrl.engine.request import RequestGroup, RunningSequence
from octetrl.engine.stopping import Decode
from octetrl.records import Completion, FinishReason, GenerationProgress, GenerationRequest, OnProgress, SessionEvent
from octetrl.system.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics(SessionMetrics):
    """Metrics of one session. The largest batch is `engine.openai.concurrency`."""

    failed: int  # siblings without an answer

    def joined(self, every: Sequence[ServerMetrics], seconds: float) -> ServerMetrics:
        return replace(SessionMetrics.joined(self, every, seconds), failed=sum(session.failed for session in every))

    def named(self, *, scales_are_calibrated: bool) -> dict[str, float]:
        """By the names of a step's metrics."""
        return {
            "rollout/tokens_per_second": self.tokens_per_second,
            "rollout/batch_occupancy": self.batch_occupancy,
        }


@dataclass(slots=True)
class Tally:
    """Running counts of one session."""

    concurrency: int
    started: float = field(default_factory=time.perf_counter)
    done: int = 0
    failed: int = 0
    generated_tokens: int = 0
    idle_seconds: float = 0.0
    in_flight_seconds: float = 0.0
    _in_flight: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def unfinished(self, count: int) -> None:
        """`count` siblings are unfinished from now on."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.in_flight_seconds += seconds * min(self._in_flight, self.concurrency)
        self.idle_seconds += 0.0 if self._in_flight else seconds
        self._in_flight = count

    def progress(self, unfinished: int) -> GenerationProgress:
        running = min(unfinished, self.concurrency)
        seconds = time.perf_counter() - self.started
        return GenerationProgress(self.done, running, unfinished - running, self.generated_tokens, seconds)

    def metrics(self) -> ServerMetrics:
        self.unfinished(self._in_flight)
        seconds = self._since - self.started
        whole = seconds or 1.0
        return ServerMetrics(
            completions=self.done,
            generated_tokens=self.generated_tokens,
            failed=self.failed,
            seconds=seconds,
            batch_occupancy=self.in_flight_seconds / (whole * self.concurrency),
            idle_share=min(1.0, self.idle_seconds / whole),
        )


GIVES_UP = 8  # failed answers before any good one
_TURN = 0.5  # seconds that `advance` waits at most
Outcome = dict[str, Any] | BaseException


class OpenaiSession(AdapterSession[int, ServerMetrics]):
    """Created by `OpenaiBackend.session`. Leaving it forgets unfinished requests."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: OpenaiConfig,
        *,
        admission: Admission,
        decode: Decode,
        on_close: Callable[[ServerMetrics], None],
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__(on_close)
        self._endpoint, self._config = endpoint, config
        self._admission, self._decode, self._on_progress = admission, decode, on_progress
        self._tally = Tally(config.concurrency)
        self._to_ask: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._num_threads = self._num_tickets = 0

    # ------------------------------------------------------------ requests

    def checked(self, request: GenerationRequest) -> RequestGroup:
        return checked(request, self._num_submitted, self._admission, self._config)

    def accept(self, group: RequestGroup, *, streams: bool = False) -> None:
        assert self._is_open, "the session is closed"
        self._num_submitted += 1
        for sibling in self._admission.siblings(group):
            ticket = self._num_tickets
            self._num_tickets += 1
            self._running[ticket] = sibling
            self._to_ask.put(ticket)
        self._count()
        while self._num_threads < min(len(self._running), self._config.concurrency):
            self._num_threads += 1
            threading.Thread(target=self._work, name=f"openai-{self._num_threads}", daemon=True).start()

    def _drop(self, keys: list[int]) -> None:
        """The server may go on with those that it has."""
        for ticket in keys:
            del self._running[ticket]
        self._count()

    def adopt(self, put: Callable[[], int], *, keeps_cache: bool) -> Sequence[SessionEvent]:
        """Weights in flight: a server has its own. Raises UserError."""
        raise UserError("cluster.weights_in_flight: engine.backend: openai takes no weights; turn it off")

    def _work(self) -> None:
        """A thread: asks for one answer after the other."""
        while (ticket := self._to_ask.get()) is not None:
            sibling = self._running.get(ticket)
            if sibling is None:
                continue  # cancelled
            outcome: Outcome
            try:
                outcome = ask(self._endpoint, self._config, sibling)
            except BaseException as error:  # raised again where the session is read
                outcome = error
            self._answered.put((ticket, outcome))

    # ------------------------------------------------------------ answers

    def events(self, wait_seconds: float = 0.0) -> list[SessionEvent]:
        """New events. Waits for the first, at most `wait_seconds`, if there is work."""
        return [
            SessionEvent(
                sibling.group.request.id, sibling.sibling, completion.token_ids, completion.logprobs, completion
            )
            for sibling, completion in self._advance(wait_seconds)
        ]

    def advance(self) -> list[tuple[RunningSequence, Completion]]:
        """The siblings that ended. Waits for the first, not for long."""
        return self._advance(_TURN)

    def _advance(self, wait_seconds: float) -> list[tuple[RunningSequence, Completion]]:
        assert self._is_open, "the session is closed"
        ended: list[tuple[RunningSequence, Completion]] = []
        while self._running:
            try:
                ticket, outcome = self._answered.get(timeout=0.0 if ended else max(wait_seconds, 1e-4))
            except queue.Empty:
                break
            sibling = self._running.pop(ticket, None)
            if sibling is not None:
                ended.append((sibling, self._completion(sibling, outcome)))
        self._count()
        if self._on_progress is not None:
            self._on_progress(self.progress())
        return ended

    def _completion(self, sibling: RunningSequence, outcome: Outcome) -> Completion:
        """What came back. Raises the errors that no other request would be spared. Once some were answered, a
        refusal or an odd answer (a content filter, one server of several) concerns its request alone."""
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            completion = read(outcome, self._config, sibling, self._decode, self._admission.vocab_size)
        except (NoAnswer, UserError) as error:
            if isinstance(error, UserError) and not self._tally.done:
                raise
            self._tally.failed += 1
            if not self._tally.done and self._tally.failed >= GIVES_UP:
                raise UserError(
                    f"engine.openai: the first {self._tally.failed} requests failed, the last one with: {error}"
                ) from error
            return replace(Completion((), (), "", FinishReason.FAILED, *STAMP), detail=str(error))
        self._tally.done += 1
        self._tally.generated_tokens += len(completion.token_ids)
        return completion

    def _count(self) -> None:
        self._tally.unfinished(len(self._running))

    # ------------------------------------------------------------ what it did

    def progress(self) -> GenerationProgress:
        return self._tally.progress(len(self._running))

    def metrics(self) -> ServerMetrics:
        return self._tally.metrics()

    @property
    def num_pages(self) -> int:
        """The server's cache is its own."""
        return 0

    @property
    def pages_in_use(self) -> int:
        return 0

    def close(self) -> None:
        """Forgets unfinished requests and ends the threads that wait for one. Does nothing on a closed session."""
        super().close()
        while self._num_threads:
            self._num_threads -= 1
            self._to_ask.put(None)


def checked(request: GenerationRequest, index: int, admission: Admission, config: OpenaiConfig) -> RequestGroup:
    """The request as a group of siblings. Raises UserError for what the server cannot be asked, and for what any engine
    refuses."""
    check_sampling(request, config)
    return admission.group(index, request)
