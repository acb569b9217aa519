"""An open session of one worker, as its process runs it: requests in, events out, no call a forward.

    submit, cancel, measure, withdraw, adopt -> commands
    commands -> [loop of the computing thread: commands, session.events()] -> events -> poll

The loop sleeps while there is no work. `poll` waits for the first event. A request that is refused, or a session that
fails, is raised by the next poll.

Workers that share a model step their sessions together. The driver calls the first of them alone. Before each step it
sends its commands to the others, so that all admit the same requests in the same order and run the same forwards.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from octetrl.records import GenerationProgress, GenerationRequest, Published, SessionEvent
from octetrl.rollout.backend import BackendSession, GenerationMetrics, KnowsLengths, SessionRecord, TellsAnswers
from octetrl.system.errors import UserError
from octetrl.trainer.tensor_peers import TensorPeers
from octetrl.workers.assignment import Said

WAIT_SECONDS = 0.005  # for events of an engine that computes elsewhere; a command waits as long at most


@dataclass(frozen=True, slots=True)
class SessionNews:
    """Events of a worker's session since the last poll."""

    events: Sequence[SessionEvent]
    progress: GenerationProgress | None
    pages_in_use: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What an open session of a worker leaves, closed before its answers have ended."""

    answers: Mapping[tuple[str, int], Said]  # of each unfinished one, what it has said; by request and sibling
    events: Sequence[SessionEvent]  # since the last poll
    record: SessionRecord


@dataclass(frozen=True, slots=True)
class _Submit:
    request: GenerationRequest
    streams: bool


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    of: Callable[[BackendSession], Any]
    answer: Future[Any]  # None if the session has ended


@dataclass(frozen=True, slots=True, eq=False)
class _Adopt:
    put: Callable[[], Published]
    keeps_cache: bool
    published: Future[Published | None]


_Command = _Submit | _Cancel | _Read | _Adopt


class HostedSession:
    """`run` belongs to the computing thread, everything else to the threads of calls."""

    def __init__(self, group: TensorPeers | None = None) -> None:
        """group: the workers that share this worker's model; None: it has it whole."""
        self._group = group
        self._changed = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._events: list[SessionEvent] = []
        self._progress: GenerationProgress | None = None
        self._pages_in_use = 0
        self._refusal: UserError | None = None
        self._closes = self._has_ended = False

    # ------------------------------------------------------------ calls

    def submit(self, requests: Sequence[GenerationRequest], streams: bool) -> None:
        self._command(*(_Submit(request, streams) for request in requests))

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._command(*(_Cancel(request_id) for request_id in request_ids))

    def measure(self) -> GenerationMetrics | None:
        """Metrics of the session so far, read between two of its steps; None if it has ended."""
        metrics: GenerationMetrics | None = self._read(lambda session: session.metrics())
        return metrics

    def withdraw(self) -> tuple[Mapping[tuple[str, int], Said], list[SessionEvent]]:
        """Stops all answers, between two steps. Returns what the unfinished ones have said so far, and the events that
        no poll has returned."""
        answers: Mapping[tuple[str, int], Said] = self._read(_withdrawn) or {}
        with self._changed:
            events, self._events = self._events, []
        return answers, events

    def _read(self, of: Callable[[BackendSession], Any]) -> Any:
        asked: Future[Any] = Future()
        with self._changed:
            if self._has_ended:
                return None
            self._commands.append(_Read(of, asked))
            self._changed.notify_all()
        return asked.result()

    def adopt(self, put: Callable[[], Published], *, keeps_cache: bool) -> Published | None:
        """Continues with the weights that `put` loads, between two forwards; None if the session has ended. The metric
        `time/publish_pause` is how long no forward ran."""
        asked: Future[Published | None] = Future()
        with self._changed:
            if self._has_ended or self._closes:
                return None
            self._commands.append(_Adopt(put, keeps_cache, asked))
            self._changed.notify_all()
        return asked.result()

    def _command(self, *commands: _Command) -> None:
        with self._changed:
            self._commands += commands
            self._changed.notify_all()

    def poll(self, wait_seconds: float, linger_seconds: float) -> SessionNews:
        """Events since the last poll. Waits for the first, and then `linger_seconds` for more of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._refusal or self._has_ended, wait_seconds)
            comes = bool(self._events) and not self._has_ended
        if comes and linger_seconds:
            time.sleep(linger_seconds)
        with self._changed:
            if self._refusal is not None:
                refusal, self._refusal = self._refusal, None
                raise refusal
            events, self._events = self._events, []
            return SessionNews(events, self._progress, self._pages_in_use)

    def close(self) -> None:
        with self._changed:
            self._closes = True
            self._changed.notify_all()

    # ------------------------------------------------------------ the loop

    def run(self, session: BackendSession) -> None:
        """Steps the session until it is closed."""
        commands: Sequence[_Command] | None = ()
        try:
            while (commands := self._shared_commands(session.has_work)) is not None:
                events = [event for command in commands for event in self._execute(session, command)]
                events += session.events(WAIT_SECONDS)
                if self._leads:
                    self._report(events, session)
        finally:
            with self._changed:
                self._has_ended = True
                for command in (*(commands or ()), *self._commands):  # also those behind one that failed
                    asked = _asked(command)
                    if asked is not None and not asked.done():
                        asked.set_result(None)
                self._changed.notify_all()

    @property
    def _leads(self) -> bool:
        """Whether the driver calls this worker."""
        return self._group is None or self._group.rank == 0

    def _shared_commands(self, has_work: bool) -> Sequence[_Command] | None:
        """The commands of the next step: requests are the same on all workers that share the model. None: the session
        is closed."""
        commands = self._next_commands(has_work) if self._leads else []
        if self._group is None:
            return commands
        requests = None if commands is None else [one for one in commands if isinstance(one, _Submit | _Cancel)]
        sent: list[_Submit | _Cancel] | None = self._group.from_first(requests)
        return commands if self._leads else sent

    def _next_commands(self, has_work: bool) -> list[_Command] | None:
        """What was asked since the last step. Waits for it where there is no work. None: the session is closed."""
        with self._changed:
            if not has_work:
                self._changed.wait_for(lambda: self._commands or self._closes)
            if self._closes:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _execute(self, session: BackendSession, command: _Command) -> Sequence[SessionEvent]:
        """The events that are due before the next forward."""
        if isinstance(command, _Adopt):
            return _adopt(session, command)
        if isinstance(command, _Cancel):
            session.cancel(command.request_id)
        elif isinstance(command, _Read):
            _answer(session, command)
        else:
            self._submit(session, command)
        return ()

    def _submit(self, session: BackendSession, command: _Submit) -> None:
        try:
            session.submit(command.request, streams=command.streams)
        except UserError as error:
            with self._changed:
                self._refusal = error if self._leads else None
                self._changed.notify_all()

    def _report(self, events: Sequence[SessionEvent], session: BackendSession) -> None:
        with self._changed:
            self._events += events
            self._progress, self._pages_in_use = session.progress(), session.pages_in_use
            if events:
                self._changed.notify_all()


def _answer(session: BackendSession, command: _Read) -> None:
    try:
        command.answer.set_result(command.of(session))
    except BaseException as error:  # it ends the session; the caller waits for the answer
        command.answer.set_exception(error)
        raise


def _asked(command: _Command) -> Future[Any] | None:
    """What the command's caller waits for."""
    if isinstance(command, _Read):
        return command.answer
    return command.published if isinstance(command, _Adopt) else None


def _withdrawn(session: BackendSession) -> Mapping[tuple[str, int], Said]:
    assert isinstance(session, TellsAnswers) and isinstance(session, KnowsLengths), "`tail_problems` comes first"
    answers = session.answers_so_far()
    for request_id in session.answer_lengths():
        session.cancel(request_id)
    return answers


def _adopt(session: BackendSession, command: _Adopt) -> Sequence[SessionEvent]:
    published: list[Published] = []

    def put() -> int:
        published.append(command.put())
        return published[0].policy_version

    began = time.perf_counter()
    try:
        events = session.adopt(put, keeps_cache=command.keeps_cache)
    except BaseException as error:  # it ends the session; the caller waits for the weights
        command.published.set_exception(error)
        raise
    command.published.set_result(with_pause(published[0], began))
    return events


def with_pause(published: Published, began: float) -> Published:
    """With `time/publish_pause`, the time since `began` (time.perf_counter)."""
    pause = {"time/publish_pause": time.perf_counter() - began}
    return replace(published, metrics={**published.metrics, **pause})
