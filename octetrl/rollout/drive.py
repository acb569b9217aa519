"""Runs many conversations at once: the engine draws for some while the environments of others compute.

One thread, the caller's, does three things in turn. It waits for one of them only if the others have nothing to do:

    takes the results of environment calls         (environments/calls.py; the calls run in other threads)
    advances the rollouts that waited for them     (rollout/converse.py), to their next request or their next calls
    takes the events of the open session           (rollout/backend.py; the engine here, or a worker elsewhere)

The first turn of a task is one request for all its siblings, which share the prompt. Each later turn is a request of
one sibling, submitted as soon as its environment has answered. Its prompt is all tokens so far; the engine finds the
pages of those it has cached. Groups start in order, as many as `max_in_flight` rollouts allow.

`Occupancy` measures how well the engine was used: the share of time in which it had nothing to do because every rollout
in flight waited for its environment. If that share is high, more rollouts in flight or faster environments shorten the
step.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octetrl.environments.calls import CallResult
from octetrl.environments.dialogue import Dialogues, RequestedCall
from octetrl.environments.scoring import ScoringRound
from octetrl.records import Completion, GenerationRequest, Rollout, SessionEvent, Task
from octetrl.rollout.agent import Capture, run_agent
from octetrl.rollout.backend import RolloutSession
from octetrl.rollout.converse import ConversationSettings, RolloutPlace, RolloutSteps, converse
from octetrl.system.errors import UserError

_LONG_WAIT = 0.5  # seconds to wait for what can come from one side only
_SHORT_WAIT = 0.01  # seconds to wait for the session while environments or rewards compute


@dataclass(slots=True)
class Occupancy:
    """Use of the engine, summed over collections of rollouts."""

    seconds: float = 0.0
    waiting_seconds: float = 0.0  # the engine had nothing to do while environments computed
    in_flight_seconds: float = 0.0  # rollout seconds in flight
    with_environment_seconds: float = 0.0  # of these, while the rollout waited for its environment
    abandoned_calls: int = 0
    late_requests: int | None = None  # None: there are no agents

    @property
    def metrics(self) -> Mapping[str, float]:
        if not self.seconds:
            return {}
        late = {} if self.late_requests is None else {"agent/late_requests": float(self.late_requests)}
        return {
            **late,
            "rollout/waiting_share": self.waiting_seconds / self.seconds,
            "rollout/in_flight": self.in_flight_seconds / self.seconds,
            "rollout/with_environment": self.with_environment_seconds / self.seconds,
            "rollout/abandoned_calls": float(self.abandoned_calls),
        }


@dataclass(slots=True, eq=False)
class _FirstTurn:
    """The siblings of a task during their first turn."""

    task: Task
    place: int
    prompt_token_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _RunningRollout:
    """A rollout in flight. `results`: of the environment calls that it waits for; None: not known yet."""

    place: RolloutPlace
    steps: RolloutSteps
    results: list[CallResult | None] = field(default_factory=list)


class Drive:
    """Runs conversations to their end. `finished` holds them by (place, sibling).

    scoring: receives the last message of each conversation that may have a reward. check: called again and again; what
    it raises ends all conversations.
    """

    def __init__(
        self,
        dialogue: Dialogues,
        session: RolloutSession,
        settings: ConversationSettings,
        occupancy: Occupancy,
        scoring: ScoringRound | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._dialogue, self._session, self._settings, self._occupancy = dialogue, session, settings, occupancy
        self._drawing: dict[str, _FirstTurn | _RunningRollout] = {}  # by request
        self._calls: dict[int, tuple[_RunningRollout, int]] = {}  # by ticket: whose call, and which of its calls
        self._in_flight = Counter[str]()  # by environment
        self._with_environment = 0  # of these
        self._clock = time.perf_counter()
        self._scoring, self._check = scoring, check
        self._capture: Capture | None = dialogue.capture
        self._run_seed = self._step = 0
        self.finished: dict[tuple[int, int], Rollout] = {}

    def run(self, requests: Sequence[tuple[int, Task, GenerationRequest]], *, run_seed: int, step: int) -> None:
        """Runs all conversations, given (place, task, request for its siblings) of each first turn."""
        self._run_seed, self._step = run_seed, step
        waiting, calls, abandoned = deque(requests), self._dialogue.calls, self._dialogue.calls.abandoned
        calls.forget()  # left over from an interrupted collection
        while waiting or self._in_flight.total():
            if self._check is not None:
                self._check()
            self._start(waiting)
            results = calls.poll(0.0 if self._session.has_work else _LONG_WAIT)
            self._count()
            for ticket, result in results:
                self._take_result(ticket, result)
            if self._capture is not None:
                self._pass_on(self._capture)
            computes = self._calls or (self._scoring is not None and not self._scoring.is_done)
            events = self._session.events(_SHORT_WAIT if computes else _LONG_WAIT)
            self._count()
            if self._scoring is not None:
                self._scoring.advance()
            for event in events:
                if self._capture is not None and self._capture.take(event):
                    continue
                if event.completion is not None:
                    self._take_completion(event, event.completion)
        self._occupancy.abandoned_calls += calls.abandoned - abandoned
        if self._capture is not None:
            self._occupancy.late_requests = (self._occupancy.late_requests or 0) + self._capture.late_requests()

    def _start(self, waiting: deque[tuple[int, Task, GenerationRequest]]) -> None:
        while waiting:
            place, task, request = waiting[0]
            most, in_flight = self._dialogue.of(task).limits.max_in_flight, self._in_flight[task.environment]
            if most is not None and in_flight and in_flight + request.num_siblings > most:
                return
            waiting.popleft()
            self._in_flight[task.environment] += request.num_siblings
            if self._dialogue.of(task).agent is not None:
                self._start_agents(place, task, request.num_siblings)
                continue
            self._drawing[request.id] = _FirstTurn(task, place, request.prompt_token_ids)
            self._session.submit(request)

    def _start_agents(self, place: int, task: Task, siblings: int) -> None:
        assert self._capture is not None, "an environment with an agent has a capture"
        dialogue = self._dialogue.of(task)
        for sibling in range(siblings):
            own = RolloutPlace(self._run_seed, self._step, place, sibling)
            steps = run_agent(dialogue, self._capture, task, own, self._settings.of(task))
            self._advance(_RunningRollout(own, steps), None)

    def _pass_on(self, capture: Capture) -> None:
        """Gives the session what agents ask, and takes back what nobody waits for."""
        for request_id in capture.cancelled():
            self._session.cancel(request_id)
        for request in capture.requests():
            try:
                self._session.submit(request)
            except UserError as error:
                capture.refuse(request.id, str(error))
            else:
                capture.accepted(request.id)

    def _take_completion(self, event: SessionEvent, completion: Completion) -> None:
        drawn = self._drawing[event.request_id]
        if isinstance(drawn, _RunningRollout):
            del self._drawing[event.request_id]
            self._advance(drawn, completion)
            return
        place = RolloutPlace(self._run_seed, self._step, drawn.place, event.sibling)
        dialogue = self._dialogue.of(drawn.task)
        steps = converse(dialogue, drawn.task, drawn.prompt_token_ids, completion, place, self._settings)
        self._advance(_RunningRollout(place, steps), None)

    def _take_result(self, ticket: int, result: CallResult) -> None:
        rollout, index = self._calls.pop(ticket)
        rollout.results[index] = result
        if None not in rollout.results:
            self._with_environment -= 1
            self._advance(rollout, tuple(rollout.results))

    def _advance(self, rollout: _RunningRollout, result: Any) -> None:
        """Sends a rollout the results that it waited for, and takes its next request or calls."""
        try:
            wanted = rollout.steps.send(result)
        except StopIteration as stop:
            self._finish((rollout.place.place, rollout.place.sibling), stop.value)
            return
        if isinstance(wanted, GenerationRequest):
            self._drawing[wanted.id] = rollout
            self._session.submit(wanted)
        else:
            self._call(rollout, wanted)

    def _finish(self, key: tuple[int, int], rollout: Rollout) -> None:
        self.finished[key] = rollout
        self._in_flight[rollout.task.environment] -= 1
        if self._scoring is not None and rollout.status.has_reward:
            last = rollout.turns[-1].completion.text if rollout.turns else ""
            self._scoring.submit(key, rollout.task, last if rollout.result is None else rollout.result)

    def _call(self, rollout: _RunningRollout, calls: tuple[RequestedCall, ...]) -> None:
        rollout.results = [None] * len(calls)
        self._with_environment += 1
        for index, call in enumerate(calls):
            start = self._dialogue.calls.start
            ticket = start(call.function, call.args, seconds=call.seconds, conversation=call.conversation)
            self._calls[ticket] = (rollout, index)

    def _count(self) -> None:
        """Adds the time since the last count. Called before anything in flight ends."""
        now, occupancy = time.perf_counter(), self._occupancy
        seconds, self._clock = now - self._clock, now
        occupancy.seconds += seconds
        occupancy.in_flight_seconds += seconds * self._in_flight.total()
        occupancy.with_environment_seconds += seconds * self._with_environment
        if self._calls and not self._session.has_work:
            occupancy.waiting_seconds += seconds
