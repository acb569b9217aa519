"""Many conversations under way at once: the engine draws for some while the environments of others are at work.

One thread, this one, does three things by turns and waits for none of them while another has something to do:

    asks what calls of environments came to        (environments/turns/calls.py; they run elsewhere)
    leads those rollouts on                        (rollout/converse.py), to their next request or their next calls
    steps the engine                               (engine/session.py)

A first turn is one request for all siblings of a task, which share the prompt; every later turn is one of a single
sibling, submitted the moment its environment has answered, with all tokens so far for its prompt: the engine finds the
pages of those it has seen. Groups start in order, as many as `max_in_flight` rollouts allow.

How well the engine was kept at work is measured (`Occupancy`): the share of the time in which it had nothing to do
because every rollout under way was with its environment. Where that is high, more rollouts in flight, or environments
that answer sooner, make the step shorter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octetrl.environments.turns.calls import Called
from octetrl.environments.turns.dialogue import Dialogue, Do
from octetrl.records import Completion, Drawn, GenerationRequest, Rollout, Task
from octetrl.rollout.converse import Conversing, Place, Speaking, converse

_LOOK_UP = 0.5  # seconds, at most, between two looks at what calls came to


class Session(Protocol):
    """What is asked of the engine's (engine/session.py)."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: GenerationRequest, /) -> None: ...

    def step(self) -> list[Drawn]: ...


@dataclass(slots=True)
class Occupancy:
    """Summed over collections of rollouts."""

    seconds: float = 0.0
    waiting_seconds: float = 0.0  # the engine had nothing to do, for environments were at work
    in_flight_seconds: float = 0.0  # of all rollouts
    with_environment_seconds: float = 0.0  # of these, those that the engine had no part in
    abandoned_calls: int = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        if not self.seconds:
            return {}
        return {
            "rollout/waiting_share": self.waiting_seconds / self.seconds,
            "rollout/in_flight": self.in_flight_seconds / self.seconds,
            "rollout/with_environment": self.with_environment_seconds / self.seconds,
            "rollout/abandoned_calls": float(self.abandoned_calls),
        }


@dataclass(slots=True, eq=False)
class _Group:
    """Siblings whose first turn is drawn."""

    task: Task
    place: int
    prompt_token_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Under:
    """A rollout under way."""

    place: Place
    led: Conversing
    answers: list[Called | None] = field(default_factory=list)  # to the calls it waits for


class Drive:
    """Leads conversations to their end. `finished` has them by (place, sibling)."""

    def __init__(self, dialogue: Dialogue, session: Session, speaking: Speaking, occupancy: Occupancy) -> None:
        self._dialogue, self._session, self._speaking, self._occupancy = dialogue, session, speaking, occupancy
        self._drawing: dict[str, _Group | _Under] = {}  # by request
        self._asked: dict[int, tuple[_Under, int]] = {}  # by ticket: whose call, and which of its calls
        self._in_flight = 0
        self._with_environment = 0  # of these
        self._clock = time.perf_counter()
        self.finished: dict[tuple[int, int], Rollout] = {}

    def run(self, requests: Sequence[tuple[int, Task, GenerationRequest]], *, run_seed: int, step: int) -> None:
        """From the first turns of (place, task, request for its siblings) to the last of all."""
        waiting, calls, abandoned = deque(requests), self._dialogue.calls, self._dialogue.calls.abandoned
        calls.forget()  # of a collection that was cut off
        while waiting or self._in_flight:
            self._start(waiting)
            found = calls.poll(0.0 if self._session.has_work else _LOOK_UP)
            self._count()
            for ticket, called in found:
                self._answered(ticket, called)
            drawings = self._session.step()
            self._count()
            for drawn in drawings:
                if drawn.completion is not None:
                    self._drawn(drawn, drawn.completion, run_seed, step)
        self._occupancy.abandoned_calls += calls.abandoned - abandoned

    def _start(self, waiting: deque[tuple[int, Task, GenerationRequest]]) -> None:
        most = self._dialogue.limits.max_in_flight
        while waiting:
            place, task, request = waiting[0]
            if most is not None and self._in_flight and self._in_flight + request.num_siblings > most:
                return
            waiting.popleft()
            self._in_flight += request.num_siblings
            self._drawing[request.id] = _Group(task, place, request.prompt_token_ids)
            self._session.submit(request)

    def _drawn(self, drawn: Drawn, completion: Completion, run_seed: int, step: int) -> None:
        of = self._drawing[drawn.request_id]
        if isinstance(of, _Under):
            del self._drawing[drawn.request_id]
            self._lead(of, completion)
            return
        place = Place(run_seed, step, of.place, drawn.sibling)
        led = converse(self._dialogue, of.task, of.prompt_token_ids, completion, place, self._speaking)
        self._lead(_Under(place, led), None)

    def _answered(self, ticket: int, called: Called) -> None:
        under, index = self._asked.pop(ticket)
        under.answers[index] = called
        if None not in under.answers:
            self._with_environment -= 1
            self._lead(under, tuple(under.answers))

    def _lead(self, under: _Under, came: Any) -> None:
        """On to what it wants next."""
        try:
            wanted = under.led.send(came)
        except StopIteration as stop:
            self.finished[under.place.place, under.place.sibling] = stop.value
            self._in_flight -= 1
            return
        if isinstance(wanted, GenerationRequest):
            self._drawing[wanted.id] = under
            self._session.submit(wanted)
        else:
            self._ask(under, wanted)

    def _ask(self, under: _Under, wanted: tuple[Do, ...]) -> None:
        under.answers = [None] * len(wanted)
        self._with_environment += 1
        for index, do in enumerate(wanted):
            start = self._dialogue.calls.start
            ticket = start(do.function, do.args, seconds=do.seconds, conversation=do.conversation)
            self._asked[ticket] = (under, index)

    def _count(self) -> None:
        """What was under way since the last count: called before anything of it ends."""
        now, occupancy = time.perf_counter(), self._occupancy
        seconds, self._clock = now - self._clock, now
        occupancy.seconds += seconds
        occupancy.in_flight_seconds += seconds * self._in_flight
        occupancy.with_environment_seconds += seconds * self._with_environment
        if self._asked and not self._session.has_work:
            occupancy.waiting_seconds += seconds
