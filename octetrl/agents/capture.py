"""What programs ask of the policy, and what it answers: a key for each rollout, from its first request to its samples.

    program's thread or process    HTTP thread (server.py)              collecting thread (rollout/drive.py)
    POST .../chat/completions  ->  prompt tokens -> `OpenRollout.enter` ->  `requests` -> the session
                               <-  the reply      <-  listeners      <-    `take`: the call is recorded, then answered

**A call is recorded before it is answered**, so nothing that a program has seen is missing. A disconnect cancels
nothing. A request that is marked as a retry, and equal to an earlier one, gets that one's answer; without the mark it
is a new call, because equal requests are also how one samples twice.

**Sampling** is the recipe's. A program's temperature and the like are ignored and counted; `max_tokens` and stop
strings count. An answer that a grammar constrains is served and not trained on.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from octetrl.agents.calls import AgentCall, after, turns_of
from octetrl.agents.prompts import MadePrompt, Message, Read, RecordedPrompts, call_lines
from octetrl.environments.programs import Model
from octetrl.records import Completion, FinishReason, GenerationRequest, SessionEvent
from octetrl.rollout.agent import Captured
from octetrl.rollout.backend import seed_of
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.converse import ConversationSettings, RolloutPlace
from octetrl.server.engine_thread import Accepted, Event
from octetrl.server.errors import ApiError, engine_failed, refused
from octetrl.server.intake import Answer
from octetrl.server.prompts import AskedChat
from octetrl.system.errors import RunFailed

Listener = Callable[[Event], None]
_PREFIX = "agent/"  # of requests' ids
_KEYS = "octetrl-"
_COUNTED = ("ignored_options", "joined_retries", "stragglers")


class SentBody:
    """A body as a client sent it. is_retry: the client says that it may have sent it before, by its number of retries
    or by a key of its own, which makes equal bodies two requests. session: `X-Session-ID`, see `Model.open_session`."""

    def __init__(self, body: bytes, headers: Mapping[str, str]) -> None:
        key = headers.get("idempotency-key", "")
        self.session = headers.get("x-session-id", "")
        self.digest = hashlib.sha256(f"{self.session}\n{key}\n".encode() + body).hexdigest()
        self.is_retry = bool(key) or headers.get("x-stainless-retry-count", "0") not in ("", "0")


@dataclass(slots=True, eq=False)
class _Asked:
    """A request of a program. events: what it has brought so far, for a retry that joins. listeners: of the HTTP
    requests that wait for it. With the last answer the request drops its prompt's tokens, which `prompt` has."""

    request: GenerationRequest
    prompt: MadePrompt
    stops: Sequence[str]  # the program's own
    session: str = ""
    listeners: dict[Answer, Listener] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    calls: list[AgentCall] = field(default_factory=list)
    unfinished: int = 1

    def put(self, event: Event) -> None:
        self.events.append(event)
        for listener in self.listeners.values():
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
        self._drawn = Counter[int]()  # requests, by the digest of prompt and limits
        self._calls: list[tuple[AgentCall, _Asked]] = []
        self._prompts = RecordedPrompts(settings.history, owner.chat, owner.read, self._lock)
        self._responses: dict[str, tuple[str, bool]] = {}  # request, and whether it had instructions, by answer's id
        self._learnt = 0  # calls that `_prompts` knows
        self._sealed = self._hit_limit = False
        self._failure: str | None = None
        self._counts = Counter[str]()
        self._begun = self._clock = time.monotonic()
        self._waiting, self._seconds_in_engine = 0, 0.0  # requests without all their answers, and while there were any
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

    def prompt_of(self, asked: AskedChat) -> MadePrompt:
        """The prompt of a chat: recorded tokens as far as they are known. Raises ApiError and TextTooLong."""
        self._learn()
        return self._prompts.make(asked)

    def earlier_messages(self, response: str | None) -> list[Message]:
        """The chat that ended with this response of /v1/responses, less its instructions; of None: no messages.
        Raises ApiError."""
        if response is None:
            return []
        request, has_instructions = self._responses.get(str(response), ("", False))
        self._learn()
        said = self._prompts.answers.get(request)
        if said is None:
            message = f"previous_response_id: this rollout has no answer '{str(response)[:80]}'"
            raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
        return said.messages()[int(has_instructions) :]

    def _learn(self) -> None:
        with self._lock:
            new, self._learnt = self._calls[self._learnt :], len(self._calls)
        for call, asked in new:
            self._prompts.learn(asked.prompt, call, asked.stops)

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def hit_limit(self) -> None:
        """The reply is an error about the program's own limits."""
        self._hit_limit = True

    def fail(self, why: str) -> None:
        """The rollout ends without a reward: not its program is the cause."""
        self._failure = why

    def enter(
        self,
        requests: Sequence[GenerationRequest],
        prompt: MadePrompt,
        answer: Answer,
        sent: SentBody,
        *,
        has_instructions: bool = False,
    ) -> None:
        """Sends the requests to the engine; `answer` gets their events. has_instructions: the first message is the
        `instructions` of /v1/responses. Raises ApiError."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._sealed:
                self._owner.late += 1
                raise ApiError(409, "this rollout has ended; its key answers nothing more", code="rollout_ended")
            earlier = self._retries.get(sent.digest) if sent.is_retry else None
            wanted = sum(request.num_siblings for request in requests)
            if earlier is None and self._num_asked + wanted > self.max_calls:
                self._hit_limit = True
                message = f"this rollout has used its {self.max_calls} calls (environment.turns.max_turns)"
                raise ApiError(403, message, code="calls_used_up")
            self._num_asked += 0 if earlier else wanted
            asked = earlier or [self._ask(request, prompt, sent.session) for request in requests]
            self._retries[sent.digest] = asked
            self._counts["joined_retries"] += earlier is not None
            self._hit_limit = False
            for own, one in zip(requests, asked, strict=True):
                listener = _listener(loop, answer, own.id)
                for event in one.events:
                    listener(event)
                one.listeners[answer] = listener
                for call in one.calls:
                    call.is_unread = False
                self._responses[own.id.partition("/")[0]] = (one.request.id, has_instructions)
        if earlier is None:
            self._owner.ask(self, [one.request for one in asked])

    def leave(self, answer: Answer) -> None:
        """An HTTP request has ended. It cancels nothing: a retry joins."""
        with self._lock:
            for asked in self._asked.values():
                asked.listeners.pop(answer, None)

    def _ask(self, request: GenerationRequest, prompt: MadePrompt, session: str) -> _Asked:
        number, place, own = len(self._asked), self._place, self._settings.sampling
        sampling = replace(
            own,
            max_new_tokens=min(own.max_new_tokens, request.sampling.max_new_tokens),
            stop=(*own.stop, *request.sampling.stop),
            stop_token_ids=(*own.stop_token_ids, *request.sampling.stop_token_ids),
            logits=request.sampling.logits,
        )
        asked_for = (sampling.max_new_tokens, sampling.stop, sampling.stop_token_ids, request.num_siblings)
        words = array("I", request.prompt_token_ids).tobytes() + repr(asked_for).encode()
        digest = int.from_bytes(hashlib.sha256(words).digest()[:7])  # parallel calls may arrive in any order
        seed = seed_of(place.run_seed, place.step, place.place, place.sibling, digest, self._drawn[digest])
        self._drawn[digest] += 1
        name = f"{_PREFIX}{place.place}.{place.sibling}.{number}"
        continues = None if prompt.continues is None else (prompt.continues.request, prompt.continues.sibling)
        sent = replace(request, id=name, sampling=sampling, seed=seed, continues=continues)
        asked = self._asked[name] = _Asked(sent, prompt, request.sampling.stop, session, unfinished=sent.num_siblings)
        self._count_waiting(1)
        return asked

    def _count_waiting(self, change: int) -> None:
        now = time.monotonic()
        self._seconds_in_engine += now - self._clock if self._waiting else 0.0
        self._clock, self._waiting = now, self._waiting + change

    # ------------------------------------------------------------ the collecting thread

    def accepted(self, request_id: str) -> None:
        with self._lock:
            self._asked[request_id].put(Accepted())

    def refuse(self, request_id: str, message: str) -> None:
        with self._lock:
            asked = self._asked[request_id]
            self._end(asked)
            asked.put(refused(message))

    def _end(self, asked: _Asked) -> None:
        """Nothing more is expected of it."""
        asked.unfinished = 0
        self._count_waiting(-1)

    def take(self, event: SessionEvent) -> None:
        """Records an answer, then replies."""
        completion = event.completion
        with self._lock:
            asked = self._asked[event.request_id]
            if completion is not None and completion.finish_reason is FinishReason.FAILED:
                self._failure = completion.detail or "no answer"
                self._end(asked)
                asked.put(engine_failed(self._failure))
                return
            if completion is not None:
                self._record(asked, event.sibling, completion)
            asked.put(event)

    def _record(self, asked: _Asked, sibling: int, completion: Completion) -> None:
        token_ids, prompt, logits = completion.token_ids, asked.prompt.piece, asked.request.sampling.logits
        end = after(prompt, token_ids, bool(token_ids) and self._owner.chat.is_end(token_ids[-1]))
        is_constrained = logits is not None and bool(logits.edits)
        call = AgentCall(
            prompt, end, completion, asked.request.id, sibling, is_constrained, is_unread=not asked.listeners
        )
        self._calls.append((call, asked))
        asked.calls.append(call)
        asked.unfinished -= 1
        if not asked.unfinished:
            self._count_waiting(-1)
            asked.request = replace(asked.request, prompt_token_ids=())

    def seal(self) -> Captured:
        with self._lock:
            self._sealed = True
            open_ones = [asked for asked in self._asked.values() if asked.unfinished]
            for asked in open_ones:
                asked.put(ApiError(409, "this rollout has ended before the answer", code="rollout_ended"))
            for call, asked in self._calls:
                call.is_constrained |= not self._trains.get(asked.session, True)
            calls = [call for call, _ in self._calls]
            for session in self._trains:
                self._owner.sessions.pop(session, None)
            self._counts["stragglers"] += len(open_ones)
            self._count_waiting(0)
            seconds = self._clock - self._begun
        self._owner.close(self, {name: asked.unfinished > 0 for name, asked in self._asked.items()})
        messages: list[dict[str, Any]] = []
        text = ""
        if self._calls:
            last, asked = self._calls[-1]
            text = last.completion.text
            messages = [*map(dict, asked.prompt.said.messages()), {"role": "assistant", "content": text}]
        metrics = {
            "agent/sampled_tokens": _tokens(calls),
            "agent/discarded_tokens": _tokens(call for call in calls if call.is_unread),
            "agent/constrained_tokens": _tokens(call for call in calls if call.is_constrained and not call.is_unread),
            "agent/engine_share": self._seconds_in_engine / seconds if seconds else 0.0,
            "time/agent": seconds,
            **{f"agent/{name}": float(self._counts[name]) for name in _COUNTED},
        }
        turns = turns_of(calls)
        lines = call_lines([(call, asked.prompt.said) for call, asked in self._calls], turns)
        return Captured(turns, messages, text, lines, metrics, self._hit_limit, self._failure)


class CapturedPolicy:
    """All open keys (rollout/agent.py: Capture). address: where programs reach it.

    chat: with the tokenizer of the thread that makes prompts. wake: ends the wait of the collecting thread.
    """

    def __init__(self, address: str, chat: ChatTokens, read: Read, wake: Callable[[], None]) -> None:
        self.address, self.chat, self.read, self._wake = address, chat, read, wake
        self.late = self._told_late = 0  # requests that came after their key was sealed, all and those told of
        self._rollouts: dict[str, OpenRollout] = {}  # by key
        self.sessions: dict[str, OpenRollout] = {}  # by what `Model.open_session` was given
        self._asking: dict[str, OpenRollout] = {}  # by request in the session
        self._new = SimpleQueue[tuple[OpenRollout, GenerationRequest]]()
        self._cancelled: list[str] = []
        self._ended: str | None = None

    @property
    def num_open(self) -> int:
        """Keys that are not sealed."""
        return len(self._rollouts)

    def find(self, key: str, session: str = "") -> OpenRollout:
        """A known key goes before a session. Raises ApiError if neither is known."""
        rollout = self._rollouts.get(key) or self.sessions.get(session)
        if rollout is None:
            self.late += key.startswith(_KEYS)
            raise ApiError(401, "this key is unknown, or its rollout has ended", code="invalid_api_key")
        return rollout

    def ask(self, rollout: OpenRollout, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._new.put((rollout, request))
        self._wake()

    def open(self, place: RolloutPlace, settings: ConversationSettings, max_calls: int) -> OpenRollout:
        key = f"{_KEYS}{secrets.token_urlsafe(24)}"
        rollout = self._rollouts[key] = OpenRollout(self, key, place, settings)
        rollout.max_calls = max_calls
        return rollout

    def close(self, rollout: OpenRollout, requests: Mapping[str, bool]) -> None:
        """requests: of the rollout, and whether each is unfinished."""
        self._rollouts.pop(rollout.key, None)
        asking = [name for name in requests if self._asking.pop(name, None) is not None]
        self._cancelled += [name for name in asking if requests[name]]

    def end(self, why: str) -> None:
        """No request can arrive from now on."""
        self._ended = why
        self._wake()

    def requests(self) -> list[GenerationRequest]:
        if self._ended is not None:
            raise RunFailed(self._ended)
        taken = []
        with suppress(Empty):
            while True:
                rollout, request = self._new.get_nowait()
                if rollout.key in self._rollouts:
                    self._asking[request.id] = rollout
                    taken.append(request)
        return taken

    def late_requests(self) -> int:
        late = self.late
        new, self._told_late = late - self._told_late, late
        return new

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
