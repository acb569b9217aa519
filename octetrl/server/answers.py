"""Answers in the form of OpenAI's API: whole or streamed in chunks, for completions and for chats.

A `Form` writes one endpoint's JSON. Both endpoints have the same content.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from octetrl.engine.stopping import INCOMPLETE, byte_of
from octetrl.environments.tools.messages import ToolCall
from octetrl.records import Top
from octetrl.server.choices import ChoicePiece


class Speller:
    """Decodes tokens to text, special tokens included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.of_one = lru_cache(maxsize=None)(self._of_one)  # of at most the whole vocabulary

    def __call__(self, token_ids: tuple[int, ...]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def bytes_of(self, token: int) -> list[int]:
        """The UTF-8 of a token's text, or the bytes of a token that is only a part of a character."""
        text = self.of_one(token)
        if INCOMPLETE in text:
            (piece,) = self._tokenizer.convert_ids_to_tokens([token])
            byte = byte_of(piece)
            if byte is not None:
                return [byte]
            if isinstance(piece, str) and all(letter in self._bytes for letter in piece):
                return [self._bytes[letter] for letter in piece]
        return list(text.encode())

    def _of_one(self, token: int) -> str:
        """A token's text after another one: decoders drop the space at the start of a text."""
        first, both = self((token,)), self((token, token))
        return both[len(first) :] if both.startswith(first) and INCOMPLETE not in both else first

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """The letters by which byte-level vocabularies write bytes: printable ones for themselves, the others in order
        from U+0100."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0

    @property
    def body(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its answers."""

    text: str
    offsets: tuple[int, ...]  # start of each token's text


@dataclass(slots=True)
class Form:
    """The common part of an answer's bodies. Subclasses write the choices of one endpoint."""

    model: str
    spell: Speller
    logprobs: bool
    token_ids: bool
    prompts: Sequence[tuple[int, ...]]
    num_siblings: int  # number of answers to each prompt
    num_top: int = 0  # likeliest tokens to show with each token
    prompt_top: int | None = None  # the same with each token of the prompt; None: the prompt is not shown
    echoed: Sequence[Echo] | None = None  # of each prompt; None: prompts are not repeated
    call_ids: str = "any"  # as the format of tool calls needs them (ToolFormat.ids)
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    kind, chunk_kind, prefix = "", "", ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def whole(self, pieces: Sequence[ChoicePiece], usage: Usage) -> dict[str, Any]:
        return {**self._head(self.kind), "choices": [self.choice(piece) for piece in pieces], "usage": usage.body}

    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        """Write the chunks of a piece; an empty list while it holds text back."""
        return [{**self._head(self.chunk_kind), "choices": [choice]} for choice in self.deltas(piece)]

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Write the chunks at the start of a stream."""
        return []

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": [], "usage": usage.body}

    def closing(self, usage: Usage, *, shows_usage: bool) -> str:
        """Write the end of a stream."""
        return (event(self.usage_chunk(usage)) if shows_usage else "") + DONE

    def call_id(self, call: ToolCall, index: int, place: int) -> str:
        """An id that is unique in the conversation, for call `place` of answer `index`."""
        unique = self.id.removeprefix(self.prefix)[1:13]
        ids = {"own": call.id, "nine": f"{unique[:5]}{index % 100:02d}{place % 100:02d}"}
        return ids.get(self.call_ids, f"call-{unique}-{index}-{place}")

    def choice(self, piece: ChoicePiece) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _ids(self, piece: ChoicePiece) -> dict[str, Any]:
        return {"token_ids": list(piece.token_ids)} if self.token_ids else {}

    def _prompt_logprobs(self, pieces: Sequence[ChoicePiece], prompt: tuple[int, ...]) -> dict[str, Any]:
        """Log-probs of the prompt's tokens in vLLM's form: an object by token id for each token, null for the first."""
        found = next((piece.prompt for piece in pieces if piece.prompt is not None), None)
        if self.prompt_top is None or found is None:
            return {}
        entries: list[Any] = [None]
        for place, (token, logprob) in enumerate(zip(prompt[1:], found.logprobs, strict=True)):
            top = found.tops[place][: self.prompt_top] if found.tops else ()
            ranks = {id: rank for rank, (id, _) in enumerate(top, 1)}
            shown = {**dict(top), token: logprob}
            entries.append(
                {
                    str(id): {"logprob": value, "rank": ranks.get(id), "decoded_token": self.spell.of_one(id)}
                    for id, value in shown.items()
                }
            )
        return {"prompt_logprobs": entries}

    def _spelled(self, piece: ChoicePiece) -> list[str]:
        return [self.spell.of_one(token) for token in piece.token_ids]


class CompletionForm(Form):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, piece: ChoicePiece) -> dict[str, Any]:
        prompt = self.prompts[piece.index // self.num_siblings]
        prompt_ids = {"prompt_token_ids": list(prompt)} if self.token_ids else {}
        return {**self._choice(piece), **prompt_ids, **self._prompt_logprobs([piece], prompt)}

    def deltas(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        echoes = self.echoed is not None and piece.is_first
        shows = piece.text or piece.finish_reason or self.logprobs or self.token_ids or echoes
        return [self._choice(piece)] if shows else []

    def _echo(self, piece: ChoicePiece) -> Echo | None:
        return None if self.echoed is None else self.echoed[piece.index // self.num_siblings]

    def _choice(self, piece: ChoicePiece) -> dict[str, Any]:
        echo = self._echo(piece)
        return {
            "index": piece.index,
            "text": piece.text if echo is None or not piece.is_first else echo.text + piece.text,
            "logprobs": self._logprobs(piece) if self.logprobs else None,
            "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }

    def _logprobs(self, piece: ChoicePiece) -> dict[str, Any]:
        echo = self._echo(piece)
        begin = 0 if echo is None else len(echo.text)
        logprobs: list[float | None] = list(piece.logprobs)
        tokens, offsets = self._spelled(piece), [begin + offset for offset in piece.offsets]
        tops: list[Any] = self._tops(piece.token_ids, piece.logprobs, piece.tops) if self.num_top else []
        if echo is None or not piece.is_first:
            return self._columns(tokens, logprobs, tops, offsets)
        assert piece.prompt is not None, "log-probs of an echoed prompt are computed with it"
        prompt, found = self.prompts[piece.index // self.num_siblings], piece.prompt
        if self.num_top:
            tops = [None, *self._tops(prompt[1:], found.logprobs, found.tops), *tops]
        return self._columns(
            [*(self.spell.of_one(token) for token in prompt), *tokens],
            [None, *found.logprobs, *logprobs],
            tops,
            [*echo.offsets, *offsets],
        )

    def _columns(
        self, tokens: list[str], logprobs: list[float | None], tops: list[Any], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops if self.num_top else None,
            "text_offset": offsets,
        }

    def _tops(self, token_ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]) -> list[dict[str, float]]:
        """Log-probs by text of the likeliest tokens and of the token itself. Of two tokens with one text, the likelier
        one is shown."""
        shown = []
        for token, logprob, top in zip(token_ids, logprobs, tops, strict=True):
            by_text: dict[str, float] = {}
            for id, value in (*top[: self.num_top], (token, logprob)):
                by_text.setdefault(self.spell.of_one(id), value)
            shown.append(by_text)
        return shown


class ChatForm(Form):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, pieces: Sequence[ChoicePiece], usage: Usage) -> dict[str, Any]:
        prompt_ids = {"prompt_token_ids": list(self.prompts[0])} if self.token_ids else {}
        return {**super().whole(pieces, usage), **prompt_ids, **self._prompt_logprobs(pieces, self.prompts[0])}

    def choice(self, piece: ChoicePiece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": self._calls(piece)}
        return {**self._around(piece), "message": message}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {
                **self._head(self.chunk_kind),
                "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
            }
            for index in range(num_choices)
        ]

    def deltas(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            calls = self._calls(piece)
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        shows = delta or piece.finish_reason or self.logprobs or self.token_ids
        return [{**self._around(piece), "delta": delta}] if shows else []

    def _around(self, piece: ChoicePiece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "logprobs": self._logprobs(piece) if self.logprobs else None,
            "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }

    def _calls(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        return [self._call(call, piece.index, place) for place, call in enumerate(piece.calls)]

    def _call(self, call: ToolCall, index: int, place: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
        return {"id": self.call_id(call, index, place), "type": "function", "function": function}

    def _logprobs(self, piece: ChoicePiece) -> dict[str, Any]:
        tops = piece.tops or ((),) * len(piece.token_ids)
        return {
            "content": [
                {
                    **self._entry(token, logprob),
                    "top_logprobs": [self._entry(id, value) for id, value in top[: self.num_top]],
                }
                for token, logprob, top in zip(piece.token_ids, piece.logprobs, tops, strict=True)
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.spell.of_one(token), "logprob": logprob, "bytes": self.spell.bytes_of(token)}


def event(body: dict[str, Any]) -> str:
    """Format a body as a server-sent event, with its name if it has a type."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body, ensure_ascii=False)}\n\n"
