"""Answers in the form of OpenAI's API: whole or streamed in chunks, for completions and for chats.

A `Form` writes one endpoint's JSON. Both endpoints have the same content.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octetrl.engine.stopping import Decode
from octetrl.environments.tools import ToolCall
from octetrl.server.choices import Piece

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


@dataclass(slots=True)
class Form:
    """The common part of an answer's bodies. Subclasses write the choices of one endpoint."""

    model: str
    spell: Decode  # decodes tokens to text, special tokens included
    logprobs: bool
    token_ids: bool
    prompts: Sequence[tuple[int, ...]]
    num_siblings: int  # number of answers to each prompt
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    kind, chunk_kind, prefix = "", "", ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return {**self._head(self.kind), "choices": [self.choice(piece) for piece in pieces], "usage": usage.body}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """Write the chunks of a piece; an empty list if there is nothing to show yet."""
        return [{**self._head(self.chunk_kind), "choices": [choice]} for choice in self.deltas(piece)]

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Write the chunks at the start of a stream."""
        return []

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": [], "usage": usage.body}

    def choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _ids(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": list(piece.token_ids)} if self.token_ids else {}

    def _spelled(self, piece: Piece) -> list[str]:
        return [self.spell((token,)) for token in piece.token_ids]


class CompletionForm(Form):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, piece: Piece) -> dict[str, Any]:
        prompt = self.prompts[piece.index // self.num_siblings]
        return {**self._choice(piece), **({"prompt_token_ids": list(prompt)} if self.token_ids else {})}

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        shows = piece.text or piece.finish_reason or self.logprobs or self.token_ids
        return [self._choice(piece)] if shows else []

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece) if self.logprobs else None,
            "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": self._spelled(piece),
            "token_logprobs": list(piece.logprobs),
            "top_logprobs": None,
            "text_offset": list(piece.offsets),
        }


class ChatForm(Form):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        prompt_ids = {"prompt_token_ids": list(self.prompts[0])} if self.token_ids else {}
        return {**super().whole(pieces, usage), **prompt_ids}

    def choice(self, piece: Piece) -> dict[str, Any]:
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

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            calls = self._calls(piece)
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        shows = delta or piece.finish_reason or self.logprobs or self.token_ids
        return [{**self._around(piece), "delta": delta}] if shows else []

    def _around(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "logprobs": self._logprobs(piece) if self.logprobs else None,
            "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }

    def _calls(self, piece: Piece) -> list[dict[str, Any]]:
        return [self._call(call, f"{piece.index}-{place}") for place, call in enumerate(piece.calls)]

    def _call(self, call: ToolCall, place: str) -> dict[str, Any]:
        """Write a tool call. Its id is unique in the conversation, not only in its message."""
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
        return {
            "id": f"call-{self.id.removeprefix(self.prefix)[1:13]}-{place}",
            "type": "function",
            "function": function,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {"content": [self._entry(*pair) for pair in zip(self._spelled(piece), piece.logprobs, strict=True)]}

    def _entry(self, token: str, logprob: float) -> dict[str, Any]:
        """Write a token's log-prob. `bytes` is null if the token is only a part of a character."""
        utf8 = None if "\ufffd" in token else list(token.encode())
        return {"token": token, "logprob": logprob, "bytes": utf8, "top_logprobs": []}


def event(body: dict[str, Any]) -> str:
    """Format a body as a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
