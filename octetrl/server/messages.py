"""/v1/messages and /v1/messages/count_tokens, Anthropic's API: text and tools, whole or streamed.

    body -> the same chat as /v1/chat/completions -> text and `tool_use` blocks

Thoughts that a client sends back are left out; those of the model are part of its text. Images, documents and tools
that a provider runs itself are refused by name. A prompt that is too long has the message that clients look for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octetrl.server.answers import Form, Speller, Usage, event
from octetrl.server.choices import ChoicePiece
from octetrl.server.errors import ApiError
from octetrl.server.requests import ChatBody, Number, Stops, parse_body

_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")  # cache_control, citations

    type: Literal["text"]
    text: str


class ToolUseBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool | None = None

    @property
    def text(self) -> str:
        return _joined(self.content)


class ThinkingBlock(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class InputMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant"]
    content: str | list[Block]

    @property
    def as_in_a_chat(self) -> list[dict[str, Any]]:
        """The message of a chat, after a message for each result of a tool."""
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        messages: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": one.tool_use_id, "content": one.text} for one in results
        ]
        if calls:
            functions = [(call.id, {"name": call.name, "arguments": _json(call.input)}) for call in calls]
            tool_calls = [{"id": id, "type": "function", "function": function} for id, function in functions]
            return [*messages, {"role": self.role, "content": text or None, "tool_calls": tool_calls}]
        return [*messages, {"role": self.role, "content": text}] if text or not results else messages


class ToolDefinition(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]

    @property
    def as_in_a_chat(self) -> dict[str, Any]:
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None

    @property
    def as_in_a_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class CountBody(BaseModel):
    """/v1/messages/count_tokens"""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Choice | None = None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages of a chat."""
        system = [] if not self.system else [{"role": "system", "content": _joined(self.system)}]
        return [*system, *(message for one in self.messages for message in one.as_in_a_chat)]

    @property
    def functions(self) -> list[dict[str, Any]]:
        return [tool.as_in_a_chat for tool in self.tools or ()]


class MessagesBody(CountBody):
    """/v1/messages. Fields that only Anthropic's servers know are ignored."""

    max_tokens: int = Field(ge=1)
    temperature: Number | None = Field(default=None, ge=0.0)
    top_p: Number | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: Stops | None = None
    stream: bool = False

    @property
    def chat(self) -> ChatBody:
        """The same request to /v1/chat/completions."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "tools": self.functions or None,
            "tool_choice": None if self.tool_choice is None or not self.tools else self.tool_choice.as_in_a_chat,
        }
        kept = {name: value for name, value in given.items() if value is not None}
        return parse_body(ChatBody, {"model": self.model, "messages": self.conversation, **kept})


class MessagesError(ApiError):
    """An error in Anthropic's form."""

    def __init__(self, error: ApiError) -> None:
        is_long = error.code == "context_length_exceeded"
        message = f"prompt is too long: {error.message}" if is_long else error.message
        super().__init__(error.status, message, code=error.code, param=error.param)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class MessageForm(Form):
    """Writes the answer's message, or its events."""

    kind, prefix = "message", "msg"

    def __init__(self, model: str, spell: Speller, prompt: tuple[int, ...], call_ids: str) -> None:
        super().__init__(
            model, spell, logprobs=False, token_ids=False, prompts=[prompt], num_siblings=1, call_ids=call_ids
        )
        self._pieces: list[ChoicePiece] = []
        self._has_text = False

    def whole(self, pieces: Sequence[ChoicePiece], usage: Usage) -> dict[str, Any]:
        self._pieces += pieces
        text = "".join(piece.text for piece in pieces)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not self._calls else []
        content += [{**call, "input": dict(arguments)} for call, arguments in self._calls]
        return {**self._message(content), "stop_reason": self._stop_reason, "usage": _usage(usage)}

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        usage = Usage(len(self.prompts[0]))
        return [
            {"type": "message_start", "message": {**self._message([]), "stop_reason": None, "usage": _usage(usage)}}
        ]

    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        self._pieces.append(piece)
        if not piece.text:
            return []
        start = [] if self._has_text else [_block("start", 0, content_block={"type": "text", "text": ""})]
        self._has_text = True
        return [*start, _block("delta", 0, delta={"type": "text_delta", "text": piece.text})]

    def closing(self, usage: Usage, *, shows_usage: bool) -> str:
        events = [_block("stop", 0)] if self._has_text else []
        for number, (call, arguments) in enumerate(self._calls, int(self._has_text)):
            partial = {"type": "input_json_delta", "partial_json": _json(arguments)}
            events += [
                _block("start", number, content_block={**call, "input": {}}),
                _block("delta", number, delta=partial),
                _block("stop", number),
            ]
        ended = {"stop_reason": self._stop_reason, "stop_sequence": None}
        events += [{"type": "message_delta", "delta": ended, "usage": _usage(usage)}, {"type": "message_stop"}]
        return "".join(map(event, events))

    @property
    def _stop_reason(self) -> str:
        return _ENDS[next(piece.finish_reason for piece in self._pieces if piece.finish_reason)]

    @property
    def _calls(self) -> list[tuple[dict[str, Any], Any]]:
        """The blocks of calls without their input, and the input."""
        return [
            ({"type": "tool_use", "id": self.call_id(call, 0, place), "name": call.name}, call.arguments)
            for place, call in enumerate(call for piece in self._pieces for call in piece.calls)
        ]

    def _message(self, content: list[Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "role": "assistant", "model": self.model}
        return {**head, "content": content, "stop_sequence": None}


def _block(kind: str, index: int, **fields: Any) -> dict[str, Any]:
    return {"type": f"content_block_{kind}", "index": index, **fields}


def _usage(usage: Usage) -> dict[str, int]:
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _json(value: Any) -> str:
    return json.dumps(dict(value), ensure_ascii=False)
