"""Admit requests and distribute events, between HTTP and the engine's thread, in the HTTP side's event loop.

A request is admitted if at most `capacity` completions are then unfinished (running or queued). An admitted request has
an `Answer`, which returns its events in order and must be closed at the end. Closing an unfinished answer cancels its
requests and frees their pages.

`drain` admits no further request. Current requests may finish until a time limit, and then get an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from octetrl.records import GenerationRequest, SessionEvent
from octetrl.server.engine_thread import Accepted, EngineThread, Event
from octetrl.server.errors import ApiError, engine_failed, shutting_down, wrong


class ClientGone(Exception):
    """The client has disconnected."""


class Answer:
    """Events of one HTTP request's generation requests."""

    def __init__(self, requests: Sequence[GenerationRequest], intake: Intake) -> None:
        self.request_ids = [request.id for request in requests]
        self.num_completions = sum(request.num_siblings for request in requests)
        self._intake = intake
        self._events: asyncio.Queue[Event | ClientGone] = asyncio.Queue()
        self._unaccepted = len(requests)
        self._unfinished = self.num_completions
        self._early: list[SessionEvent] = []

    def put(self, event: Event | ClientGone) -> None:
        self._events.put_nowait(event)

    async def accepted(self) -> None:
        """Return when the engine has accepted all requests. Raises ApiError for a refused one."""
        while self._unaccepted:
            self._early += self._read(await self._events.get())

    async def drawn(self) -> AsyncIterator[list[SessionEvent]]:
        """Lists of new events, until everything is finished. Raises ApiError and ClientGone."""
        while self._unfinished:
            batch, self._early = self._early, []
            if not batch:
                batch = self._read(await self._events.get())
            while not self._events.empty():
                batch += self._read(self._events.get_nowait())
            self._unfinished -= sum(event.completion is not None for event in batch)
            if batch:
                yield batch

    def close(self) -> None:
        """Leave the intake and cancel unfinished requests. A second call has no effect."""
        self._intake.leave(self)

    def _read(self, event: Event | ClientGone) -> list[SessionEvent]:
        match event:
            case SessionEvent():
                return [event]
            case Accepted():
                self._unaccepted -= 1
                return []
            case _:
                raise event


class Intake:
    """Admits requests. `capacity`: largest number of running and queued completions."""

    def __init__(self, engine: EngineThread, *, capacity: int) -> None:
        self.engine, self.capacity = engine, capacity
        self.most_answers = capacity  # HTTP requests with completions, where fewer connections fit than that
        self.draining = False
        self.cancelled = 0  # number of admitted requests that were closed before they finished
        self._answers: dict[str, Answer] = {}  # by the ids of their generation requests
        self._inside: dict[Answer, set[str]] = {}  # ids of each answer's requests that the engine still has
        self._siblings: dict[str, int] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def start(self) -> None:
        """Start the engine's thread. Call it inside the event loop."""
        loop = asyncio.get_running_loop()

        def deliver(events: list[tuple[str, Event]]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no client is waiting
                loop.call_soon_threadsafe(self._dispatch, events)

        self.engine.start(deliver)

    @property
    def num_completions(self) -> int:
        return sum(answer.num_completions for answer in self._inside)

    def enter(self, requests: Sequence[GenerationRequest], *, streams: bool) -> Answer:
        """Admit the requests and pass them to the engine. Raises ApiError if there is no capacity."""
        self._check_room(sum(request.num_siblings for request in requests))
        answer = Answer(requests, self)
        self._inside[answer] = set(answer.request_ids)
        self._empty.clear()
        for request in requests:
            self._answers[request.id] = answer
            self._siblings[request.id] = request.num_siblings
            self.engine.submit(request, streams=streams)
        return answer

    def check_size(self, wanted: int) -> None:
        """Raise ApiError if one request asks for more completions than are ever admitted."""
        if wanted > self.capacity:
            raise wrong("n", f"{wanted} completions in one request; this server allows {self.capacity}; ask for fewer")

    def _check_room(self, wanted: int) -> None:
        if self.draining:
            raise shutting_down()
        if not self.engine.is_alive:
            raise engine_failed("its thread has ended")
        self.check_size(wanted)
        if self.num_completions + wanted > self.capacity or len(self._inside) >= self.most_answers:
            raise ApiError(
                429,
                f"the queue is full: {self.num_completions} completions of {len(self._inside)} requests run or wait,"
                f" and {self.capacity} of {self.most_answers} are allowed; try again later",
                code="queue_full",
            )

    def leave(self, answer: Answer) -> None:
        at_hand = self._inside.pop(answer, None)
        if at_hand is None:
            return
        for request_id in answer.request_ids:
            del self._answers[request_id], self._siblings[request_id]
        for request_id in at_hand:
            self.engine.cancel(request_id)
        self.cancelled += bool(at_hand)
        if not self._inside:
            self._empty.set()

    def _dispatch(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            answer = self._answers.get(request_id)
            if answer is None:
                continue  # the answer was closed
            if isinstance(event, SessionEvent) and event.completion is not None:
                self._siblings[request_id] -= 1
            if isinstance(event, ApiError) or self._siblings[request_id] == 0:
                self._inside[answer].discard(request_id)
            answer.put(event)

    # ------------------------------------------------------------ the end

    async def drain(self, seconds: float) -> None:
        """Admit no further request. Return when all have finished, or got an error after `seconds`."""
        self.draining = True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            self.tell_all_to_leave()

    def tell_all_to_leave(self) -> None:
        self.draining = True
        for answer in list(self._inside):
            answer.put(shutting_down())
