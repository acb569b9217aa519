"""Run the engine in its own thread. Commands arrive in a queue. Events are delivered in lists, one per step.

    submit, cancel -> queue -> [execute commands -> session.events() -> deliver] -> events by request id

The thread sleeps while there is no work. The receiver of events must not block, so the HTTP side passes them to its own
loop.

An error in a step fails all current requests, because the session's pages are lost. The next request opens a new
session, so one bad prompt does not end the service. A permanently broken engine fails each request at once. `error`
describes the failure until a completion has succeeded again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from octetrl.records import GenerationProgress, GenerationRequest, SessionEvent
from octetrl.rollout.backend import GenerationMetrics, MeasuredSession
from octetrl.server.errors import ApiError, engine_failed, refused
from octetrl.system.errors import UserError

METRICS_SECONDS = 10.0  # time between two reads of the metrics that are on the device
WAIT_SECONDS = 0.005  # for events of replicas in other processes; a new request waits as long at most

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is in the session."""


Event = SessionEvent | Accepted | ApiError  # an error ends the request: it can't be served, or the engine failed
Deliver = Callable[[list[tuple[str, Event]]], None]
_Command = tuple[GenerationRequest, bool] | str | None  # a request and whether it streams; one to cancel; stop


class EngineThread:
    """The engine's thread. Only this thread calls `open_session` and uses the session that it opens."""

    def __init__(
        self,
        open_session: Callable[[], AbstractContextManager[MeasuredSession]],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called at the end of the thread."""
        self.error: str | None = None  # the last failure, until a completion has succeeded again
        self.failures = 0
        self.metrics: GenerationMetrics | None = None  # read every METRICS_SECONDS
        self._open_session, self._on_end = open_session, on_end
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._held: list[_Command] = []  # taken from the queue but not executed yet
        self._deliver: Deliver = lambda events: None
        self._session: MeasuredSession | None = None
        self._siblings: dict[str, int] = {}  # number of unfinished siblings of each current request
        self._begun = threading.Event()
        self._stops = False
        self._measured = -METRICS_SECONDS
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, deliver: Deliver) -> None:
        """Start the thread, and return when the first session is open and its cache allocated.

        Raises RuntimeError if the session cannot be opened."""
        self._deliver = deliver
        self._thread.start()
        self._begun.wait()
        if self.error is not None:
            self.stop()
            raise RuntimeError(f"the engine could not start: {self.error}")

    def stop(self, seconds: float = 30.0) -> None:
        """End the session and drop current requests. Waits at most `seconds` for the running step."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def submit(self, request: GenerationRequest, *, streams: bool) -> None:
        self._commands.put((request, streams))

    def cancel(self, request_id: str) -> None:
        self._commands.put(request_id)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def progress(self) -> GenerationProgress:
        """Current progress, from counts on the host. It may be read from any thread."""
        session = self._session
        return GenerationProgress(0, 0, 0, 0, 0.0) if session is None else session.progress()

    @property
    def pages_in_use(self) -> int:
        session = self._session
        return 0 if session is None else session.pages_in_use

    @property
    def num_pages(self) -> int:
        session = self._session
        return 0 if session is None else session.num_pages

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            self._serve_sessions()
        finally:
            self._on_end()

    def _serve_sessions(self) -> None:
        while not self._stops:
            try:
                with self._open_session() as session:
                    self._session = session
                    self._begun.set()
                    self._serve(session)
            except Exception as error:  # any error must reach the waiting clients
                self._fail(error)
                self._await_command()
            finally:
                self._session = None

    def _serve(self, session: MeasuredSession) -> None:
        while not self._stops:
            for command in self._taken(wait=not session.has_work):
                self._obey(command, session)
            events: list[tuple[str, Event]] = []
            for drawn in session.events(WAIT_SECONDS):
                events.append((drawn.request_id, drawn))
                if drawn.completion is not None:
                    self.error = None
                    self._ended(drawn.request_id)
            if events:
                self._deliver(events)
            if time.monotonic() - self._measured > METRICS_SECONDS:
                self.metrics = session.metrics() or self.metrics
                self._measured = time.monotonic()

    def _taken(self, *, wait: bool) -> Iterator[_Command]:
        """Yield the commands that arrived since the last step. `wait`: wait for the first one."""
        try:
            while not self._stops:
                yield self._held.pop() if self._held else self._commands.get(block=wait)
                wait = False
        except Empty:
            return

    def _obey(self, command: _Command, session: MeasuredSession) -> None:
        if command is None:
            self._stops = True
        elif isinstance(command, str):
            session.cancel(command)
            self._siblings.pop(command, None)
        else:
            request, streams = command
            self._siblings[request.id] = request.num_siblings  # before anything can fail
            try:
                session.submit(request, streams=streams)
            except UserError as error:
                del self._siblings[request.id]
                self._deliver([(request.id, refused(str(error)))])
            else:
                self._deliver([(request.id, Accepted())])

    def _ended(self, request_id: str) -> None:
        self._siblings[request_id] -= 1
        if self._siblings[request_id] == 0:
            del self._siblings[request_id]

    def _fail(self, error: Exception) -> None:
        log.exception("the engine failed with %d requests in flight", len(self._siblings))
        self.error = f"{type(error).__name__}: {error}"
        self.failures += 1
        failed, self._siblings = list(self._siblings), {}
        self._begun.set()
        self._deliver([(request_id, engine_failed(self.error)) for request_id in failed])

    def _await_command(self) -> None:
        """Wait for a command, so that a broken engine is only restarted for a request."""
        command = self._commands.get()
        if command is None:
            self._stops = True
            return
        if isinstance(command, tuple):
            self._siblings[command[0].id] = command[0].num_siblings  # fails too if no session can be opened
        self._held.append(command)
