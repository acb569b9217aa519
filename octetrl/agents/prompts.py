"""The prompts of one rollout's requests: recorded tokens wherever the program's messages say what was recorded.

    history: recorded   the longest beginning of the messages that ends with a recorded answer keeps its tokens, and
                        only the messages after it are tokenized; where none is found, as `template`
    history: template   the template renders all messages; recorded tokens are kept where their text begins that text

**Messages are equal** (`identity`) if a program would call them equal: no content is empty content, calls are compared
by name and parsed arguments, ids are ignored, an answer may be split into its text and its calls, and may have lost its
thoughts. Tools and variables of the template must be the same.

One thread makes prompts, the tokenizer's. Answers arrive in another one, and are read when the next prompt is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from octetrl.agents.calls import AgentCall
from octetrl.environments.tools.formats.reading import UNTHINK
from octetrl.records import Completion, Turn
from octetrl.rollout.chat_tokens import ChatTokens, ReplyError
from octetrl.rollout.history import History, Piece
from octetrl.server.prompts import AskedChat
from octetrl.system.errors import UserError

Message = Mapping[str, Any]
Key = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Said:
    """A message after those of `parent`, once for all conversations that begin with them.

    prompt: of a request that ends with it. answer: the call whose answer it is."""

    parent: Said | None = None
    message: Message = field(default_factory=dict)
    prompt: Piece | None = None
    answer: AgentCall | None = None
    following: dict[Key, list[Said]] = field(default_factory=dict)

    def messages(self) -> list[Message]:
        """All up to this one."""
        found: list[Message] = []
        place: Said = self
        while place.parent is not None:
            found.append(place.message)
            place = place.parent
        return found[::-1]

    def since_answer(self) -> tuple[list[Message], AgentCall | None]:
        """The messages after the last recorded answer, and that answer's call."""
        found: list[Message] = []
        place: Said = self
        while place.parent is not None and place.answer is None:
            found.append(place.message)
            place = place.parent
        return found[::-1], place.answer

    def then(self, message: Message) -> Said:
        """The message after this one, which may be known already."""
        known = self.following.setdefault(identity(message), [])
        if not known:
            known.append(Said(self, message))
        return known[0]


@dataclass(frozen=True, slots=True)
class MadePrompt:
    """The prompt of one request. said: its last message. continues: whose pages have its beginning."""

    piece: Piece
    said: Said
    tools: Sequence[Any] | None
    continues: AgentCall | None


Read = Callable[[Completion, Sequence[Any] | None, Sequence[str]], Message]
"""The message of an answer, as its client gets it, by the request's tools and stop strings."""


class RecordedPrompts:
    """Makes the prompts of one rollout. chat: with a tokenizer of the thread that makes them. lock: held where the tree
    of tokens changes."""

    def __init__(self, history: History, chat: ChatTokens, read: Read, lock: Lock) -> None:
        self._history, self._chat, self._read, self._lock = history, chat, read, lock
        self._tokens = Piece()
        self._begins: dict[str, Said] = {}  # by tools and variables
        self._calls: dict[Piece, AgentCall] = {}  # the first one with this end, or prompt, or point before its end
        self.answers: dict[str, Said] = {}  # by request; of several answers the first

    def learn(self, prompt: MadePrompt, call: AgentCall, stops: Sequence[str]) -> None:
        """Makes an answer known."""
        piece = call.end
        while piece is not prompt.piece and piece.parent is not None:
            self._calls.setdefault(piece, call)
            if piece.text is None:
                piece.text = self._chat.text_of(piece.token_ids)
            piece = piece.parent
        self._calls.setdefault(piece, call)
        answer = self._read(call.completion, prompt.tools, stops)
        said = Said(prompt.said, answer, answer=call)
        self.answers.setdefault(call.request, said)
        for key in dict.fromkeys((identity(answer), identity(answer, with_thoughts=False))):
            prompt.said.following.setdefault(key, []).append(said)

    def make(self, asked: AskedChat) -> MadePrompt:
        """The prompt of these messages. Raises ApiError and TextTooLong."""
        begin = self._begins.setdefault(repr((asked.tools, asked.variables)), Said())
        said, rest = self._known(begin, list(_joined(asked.messages)))
        piece = None
        if self._history == "recorded":
            piece = said.prompt if not rest else None
            if piece is None and said.answer is not None:
                piece = self._after(said.answer, said, rest, asked.variables)
        if piece is None:
            text = asked.render(asked.messages)
            with self._lock:
                kept, characters = self._tokens.longest(text)
            new = asked.encode(text[characters:])
            with self._lock:
                piece = kept.add(new, text[characters:])
        for message in rest:
            said = said.then(message)
        said.prompt = said.prompt or piece
        before = piece.parent
        continues = self._calls.get(piece) or (None if before is None else self._calls.get(before))
        return MadePrompt(piece, said, asked.tools, continues)

    def _known(self, begin: Said, messages: list[Message]) -> tuple[Said, list[Message]]:
        """The last recorded answer that a beginning of the messages ends with, or all of them if they were a prompt
        before; and the messages after it."""
        best, number, reached = begin, 0, [begin]
        for place, message in enumerate(messages, 1):
            key = identity(message)
            reached = [after for one in reached for after in one.following.get(key, ())]
            if not reached:
                break
            found = next((one for one in reached if one.answer is not None), None)
            if found is not None:
                best, number = found, place
        whole = next((one for one in reached if one.prompt is not None), None)
        return (best, messages[number:]) if whole is None else (whole, [])

    def _after(
        self, call: AgentCall, said: Said, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> Piece | None:
        """The answer's tokens, and those of the messages after it. None: the template can't write them alone."""
        made = said.message.get("tool_calls", ())
        with suppress(ReplyError, UserError):
            chat = self._chat.with_template((), variables)
            new = chat.tokens_after(made, messages, call.completion.token_ids)
            text = self._chat.text_of(new)
            with self._lock:
                return call.end.add(new, text)
        return None


def call_lines(calls: Sequence[tuple[AgentCall, Said]], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The tree of a rollout's calls, given each with the last message of its prompt (`Rollout.calls`)."""
    numbers = {call: number for number, (call, _) in enumerate(calls)}
    trained = {id(turn.completion): number for number, turn in enumerate(turns)}
    lines: list[dict[str, Any]] = []
    for call, said in calls:
        messages, parent = said.since_answer()
        new = [{"role": one["role"], "text": _shown(one)} for one in messages]
        line: dict[str, Any] = {"parent": None if parent is None else numbers.get(parent), "messages": new}
        turn = trained.get(id(call.completion))
        if turn is not None:
            lines.append({**line, "turn": turn})
            continue
        why = "discarded" if call.is_unread else "constrained"
        lines.append({**line, why: len(call.completion.token_ids), "text": call.completion.text})
    return lines


def _shown(message: Message) -> str:
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [message.get("content"), *calls]))


def identity(message: Message, *, with_thoughts: bool = True) -> Key:
    """Equal for messages that a program would call equal."""
    role, content = message["role"], message.get("content") or ""
    if role == "assistant":
        content = (content if with_thoughts else content.rpartition(UNTHINK)[2]).strip()
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    written = json.dumps([message.get("name") if role != "tool" else None, calls], sort_keys=True, default=str)
    return role, content, written


def _joined(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages, with an assistant's calls in the message of its text before them."""
    last: Message | None = None
    for message in messages:
        is_rest = message["role"] == "assistant" and message.get("tool_calls") and not message.get("content")
        if last is not None and is_rest and last["role"] == "assistant" and not last.get("tool_calls"):
            last = {**last, "tool_calls": message["tool_calls"]}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last
