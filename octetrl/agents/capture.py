"""What programs ask of the policy, and what it answers: a key for each rollout, from its first request to its samples.

    program's thread or process    HTTP thread (server.py)              collecting thread (rollout/drive.py)
    POST .../chat/completions  ->  prompt tokens -> `OpenRollout.enter` ->  `requests` -> the session
                               <-  the reply      <-  listeners      <-    `take`: the call is recorded, then answered

**A call is recorded before it is answered**, so nothing that a program has seen is missing. A disconnect cancels
nothing. A request that is marked as a retry, and equal to an earlier one, gets that one's answer; without the mark it
is a new call, because equal requests are also how one samples twice.

**Prompts.** The chat template renders what the program sends. Where the beginning of that text is the text of tokens
that are recorded, these tokens are kept, and only the rest is tokenized (as rollout/history.py does).

**Sampling** is the recipe's. A program's temperature and the like are ignored and counted; `max_tokens` and stop
strings count. An answer that a grammar constrains is served and not trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from octetrl.agents.calls import AgentCall, discarded, turns_of
from octetrl.environments.programs import Model
from octetrl.records import FinishReason, GenerationRequest, SessionEvent
from octetrl.rollout.agent import Captured
from octetrl.rollout.backend import seed_of
from octetrl.rollout.converse import ConversationSettings, RolloutPlace
from octetrl.server.engine_thread import Accepted, Event
from octetrl.server.errors import ApiError, engine_failed, refused
from octetrl.server.intake import Answer

Listener = Callable[[Event], None]
_PREFIX = "agent/"  # of requests' ids


class SentBody:
    """A body as a client sent it. is_retry: the client says that it may have sent it before, by its number of retries
    or by a key of its own, which makes equal bodies two requests. session: `X-Session-ID`, see `Model.open_session`."""

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        key = headers.get("idempotency-key", "")
        self.session = headers.get("x-session-id", "")
        self.digest = hashlib.sha256(f"{self.session}\n{key}\n".encode() + body).hexdigest()
        self.is_retry = bool(key) or headers.get("x-stainless-retry-count", "0") not in ("", "0")


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str
    messages: Sequence[dict[str, Any]]
    continues: tuple[str, int] | None


@dataclass(slots=True, eq=False)
class _Asked:
    """A request of a program. events: what it has brought so far, for a retry that joins."""

    request: GenerationRequest
    prompt: _Prompt
    session: str = ""
    begun: float = field(default_factory=time.monotonic)
    listeners: list[Listener] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    unfinished: int = 1

    def put(self, event: Event) -> None:
        self.events.append(event)
        for listener in self.listeners:
            listener(event)


class OpenRollout:
    """The capture of one rollout, under its key."""

    def __init__(self, owner: CapturedPolicy, key: str, place: RolloutPlace, settings: ConversationSettings) -> None:
        self.key, self._owner, self._place, self._settings = key, owner, place, settings
        self.max_calls = 1  # answers
        self._num_asked = 0
        self._lock = threading.Lock()
        self._asked: dict[str, _Asked] = {}  # by the request's id
        self._retries: dict[str, list[_Asked]] = {}  # by the digest of a body
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._drawn = Counter[tuple[int, ...]]()  # requests with this prompt
        self._calls: list[tuple[AgentCall, _Asked, int]] = []  # with the sibling
        self._points: list[tuple[str, tuple[int, ...], tuple[str, int]]] = []  # text, tokens, the call
        self._spelled = 0  # calls in `_points`
        self._sealed = self._hit_limit = False
        self._failure: str | None = None
        self._counts = Counter[str]()
        self._seconds_in_engine = 0.0
        self._trains: dict[str, bool] = {}  # by session

    @property
    def model(self) -> Model:
        return Model(f"{self._owner.address}/v1", self.key, sessions=self._open_session)

    def _open_session(self, session: str, trains: bool) -> None:
        with self._lock:
            if not self._sealed:
                self._trains[session] = trains
                self._owner.sessions[session] = self

    # ------------------------------------------------------------ the HTTP thread and its tokenizer

    def tokens_of(
        self, text: str, messages: Sequence[dict[str, Any]], encode: Callable[[str], Sequence[int]]
    ) -> tuple[int, ...]:
        """The tokens of a rendered prompt: recorded ones as far as their text begins it."""
        with self._lock:
            new, self._spelled = self._calls[self._spelled :], len(self._calls)
        for call, asked, sibling in new:
            whole, request = asked.prompt.text, (asked.request.id, sibling)
            self._points.append((whole, call.prompt_token_ids, request))
            tokens = call.completion.token_ids
            ends = [len(tokens) - 1] if tokens and tokens[-1] in self._owner.ends else []
            for end in (*ends, len(tokens)):  # a template may end an answer in another way than the policy did
                text_of_answer = self._owner.spell(tokens[:end])
                self._points.append((whole + text_of_answer, call.prompt_token_ids + tokens[:end], request))
        known, recorded, parent = max(
            (point for point in self._points if text.startswith(point[0])),
            key=lambda point: len(point[0]),
            default=("", (), None),
        )
        token_ids = (*recorded, *encode(text[len(known) :]))
        self._prompts[token_ids] = _Prompt(text, messages, parent)
        return token_ids

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def hit_limit(self) -> None:
        """The reply is an error about the program's own limits."""
        self._hit_limit = True

    def enter(self, requests: Sequence[GenerationRequest], answer: Answer, sent: SentBody) -> None:
        """Sends the requests to the engine; `answer` gets their events. Raises ApiError."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._sealed:
                raise ApiError(409, "this rollout has ended; its key answers nothing more", code="rollout_ended")
            earlier = self._retries.get(sent.digest) if sent.is_retry else None
            wanted = sum(request.num_siblings for request in requests)
            if earlier is None and self._num_asked + wanted > self.max_calls:
                self._hit_limit = True
                message = f"this rollout has used its {self.max_calls} calls (environment.turns.max_turns)"
                raise ApiError(403, message, code="calls_used_up")
            self._num_asked += 0 if earlier else wanted
            asked = earlier or [self._ask(request, sent.session) for request in requests]
            self._retries[sent.digest] = asked
            self._counts["joined_retries"] += earlier is not None
            self._hit_limit = False
            for own, one in zip(requests, asked, strict=True):
                listener = _listener(loop, answer, own.id)
                for event in one.events:
                    listener(event)
                one.listeners.append(listener)
        if earlier is None:
            self._owner.ask(self, [one.request for one in asked])

    def _ask(self, request: GenerationRequest, session: str) -> _Asked:
        number, place, own = len(self._asked), self._place, self._settings.sampling
        token_ids = request.prompt_token_ids
        prompt, again = self._prompts[token_ids], self._drawn[token_ids]
        self._drawn[token_ids] += 1
        sampling = replace(
            own,
            max_new_tokens=min(own.max_new_tokens, request.sampling.max_new_tokens),
            stop=(*own.stop, *request.sampling.stop),
            stop_token_ids=(*own.stop_token_ids, *request.sampling.stop_token_ids),
            logits=request.sampling.logits,
        )
        digest = int(hashlib.sha256(repr(token_ids).encode()).hexdigest()[:15], 16)
        seed = seed_of(place.run_seed, place.step, place.place, place.sibling, digest, again)
        name = f"{_PREFIX}{place.place}.{place.sibling}.{number}"
        sent = replace(request, id=name, sampling=sampling, seed=seed, continues=prompt.continues)
        asked = self._asked[name] = _Asked(sent, prompt, session, unfinished=sent.num_siblings)
        return asked

    # ------------------------------------------------------------ the collecting thread

    def accepted(self, request_id: str) -> None:
        with self._lock:
            self._asked[request_id].put(Accepted())

    def refuse(self, request_id: str, message: str) -> None:
        with self._lock:
            asked = self._asked[request_id]
            asked.unfinished = 0
            asked.put(refused(message))

    def take(self, event: SessionEvent) -> None:
        """Records an answer, then replies."""
        completion = event.completion
        with self._lock:
            asked = self._asked[event.request_id]
            if completion is not None and completion.finish_reason is FinishReason.FAILED:
                self._failure = completion.detail or "no answer"
                asked.unfinished = 0
                asked.put(engine_failed(self._failure))
                return
            if completion is not None:
                logits = asked.request.sampling.logits
                is_constrained = logits is not None and logits.edits
                call = AgentCall(asked.request.prompt_token_ids, completion, is_constrained, asked.request.id)
                self._calls.append((call, asked, event.sibling))
                asked.unfinished -= 1
                self._seconds_in_engine += time.monotonic() - asked.begun
            asked.put(event)

    def seal(self) -> Captured:
        with self._lock:
            self._sealed = True
            open_ones = [asked for asked in self._asked.values() if asked.unfinished]
            for asked in open_ones:
                asked.put(ApiError(409, "this rollout has ended before the answer", code="rollout_ended"))
            trains = self._trains
            calls = [
                call if trains.get(asked.session, True) else replace(call, is_constrained=True)
                for call, asked, _ in self._calls
            ]
            for session in trains:
                self._owner.sessions.pop(session, None)
            last = self._calls[-1] if self._calls else None
            counts = Counter(self._counts)
        self._owner.close(self, {name: asked.unfinished > 0 for name, asked in self._asked.items()})
        left_out = discarded(calls)
        metrics = {
            "agent/sampled_tokens": _tokens(calls),
            "agent/discarded_tokens": _tokens(calls[number] for number in left_out),
            "agent/constrained_tokens": _tokens(
                call for number, call in enumerate(calls) if call.is_constrained and number not in left_out
            ),
            "agent/time_in_engine": self._seconds_in_engine,
            **{f"agent/{name}": float(counts[name]) for name in ("ignored_options", "joined_retries")},
        }
        text = "" if last is None else last[0].completion.text
        messages = [] if last is None else [*last[1].prompt.messages, {"role": "assistant", "content": text}]
        return Captured(turns_of(calls, left_out), messages, text, len(calls), metrics, self._hit_limit, self._failure)


class CapturedPolicy:
    """All open keys (rollout/agent.py: Capture). address: where programs reach it.

    spell: text of tokens, special ones included. ends: stop tokens of the model. wake: ends the wait of the collecting
    thread.
    """

    def __init__(
        self, address: str, spell: Callable[[tuple[int, ...]], str], ends: Iterable[int], wake: Callable[[], None]
    ) -> None:
        self.address, self.spell, self.ends, self._wake = address, spell, frozenset(ends), wake
        self._rollouts: dict[str, OpenRollout] = {}  # by key
        self.sessions: dict[str, OpenRollout] = {}  # by what `Model.open_session` was given
        self._asking: dict[str, OpenRollout] = {}  # by request in the session
        self._new = SimpleQueue[tuple[OpenRollout, GenerationRequest]]()
        self._cancelled: list[str] = []

    def find(self, key: str, session: str = "") -> OpenRollout:
        """A known key goes before a session. Raises ApiError if neither is known."""
        rollout = self._rollouts.get(key) or self.sessions.get(session)
        if rollout is None:
            raise ApiError(401, "this key is unknown, or its rollout has ended", code="invalid_api_key")
        return rollout

    def ask(self, rollout: OpenRollout, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._new.put((rollout, request))
        self._wake()

    def open(self, place: RolloutPlace, settings: ConversationSettings, max_calls: int) -> OpenRollout:
        key = f"octetrl-{secrets.token_urlsafe(24)}"
        rollout = self._rollouts[key] = OpenRollout(self, key, place, settings)
        rollout.max_calls = max_calls
        return rollout

    def close(self, rollout: OpenRollout, requests: Mapping[str, bool]) -> None:
        """requests: of the rollout, and whether each is unfinished."""
        self._rollouts.pop(rollout.key, None)
        asking = [name for name in requests if self._asking.pop(name, None) is not None]
        self._cancelled += [name for name in asking if requests[name]]

    def requests(self) -> list[GenerationRequest]:
        taken = []
        with suppress(Empty):
            while True:
                rollout, request = self._new.get_nowait()
                if rollout.key in self._rollouts:
                    self._asking[request.id] = rollout
                    taken.append(request)
        return taken

    def cancelled(self) -> list[str]:
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def accepted(self, request_id: str) -> None:
        self._asking[request_id].accepted(request_id)

    def refuse(self, request_id: str, message: str) -> None:
        self._asking.pop(request_id).refuse(request_id, message)

    def take(self, event: SessionEvent) -> bool:
        """Whether the event belongs to a program's request."""
        rollout = self._asking.get(event.request_id)
        if rollout is not None:
            rollout.take(event)
        return event.request_id.startswith(_PREFIX)  # one that was cancelled may still arrive


def _listener(loop: asyncio.AbstractEventLoop, answer: Answer, request_id: str) -> Listener:
    def deliver(event: Event) -> None:
        own = replace(event, request_id=request_id) if isinstance(event, SessionEvent) else event
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer.put, own)

    return deliver


def _tokens(calls: Iterable[AgentCall]) -> float:
    return float(sum(len(call.completion.token_ids) for call in calls))
