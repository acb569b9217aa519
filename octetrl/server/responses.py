"""/v1/responses, OpenAI's newer API, in a small part: text in, one text out, whole or streamed.

    body -> the same chat as /v1/chat/completions -> one message of output

Nothing is stored: each request brings its whole conversation. What would need a store (`previous_response_id`,
`background`), tools, images and reasoning items are refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octetrl.config.schema import MOST_TEMPERATURE
from octetrl.server.answers import Form, Speller, Usage, event
from octetrl.server.choices import ChoicePiece
from octetrl.server.errors import ApiError
from octetrl.server.requests import ChatBody, GenerationBody, Message, Number

_FIELDS = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}


class InputPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(BaseModel):
    """A message of the conversation. Clients may send back an answer's message, with its id and status."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(BaseModel):
    """`json_schema` has its fields here, not in a section of their own as in a chat."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("a schema belongs to the type 'json_schema', which needs one")
        return self

    @property
    def as_in_a_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.json_schema}}


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: None = None


class ResponsesBody(BaseModel):
    """/v1/responses"""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None  # None: the server's
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: Number | None = Field(default=None, ge=0.0, le=MOST_TEMPERATURE)
    top_p: Number | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[Any] | None = Field(default=None, max_length=0)
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    reasoning: None = None
    include: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Any = None  # of no tools
    parallel_tool_calls: Any = None
    max_tool_calls: Any = None
    stream_options: Any = None
    user: Any = None
    metadata: dict[str, str] | None = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def chat(self) -> ChatBody:
        """The same request to /v1/chat/completions."""
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages += [Message(role=item.role, content=item.text) for item in items]
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.text is not None and self.text.format is not None:
            given["response_format"] = self.text.format.as_in_a_chat
        return ChatBody.model_validate(
            {"model": self.model, "messages": [message.model_dump() for message in messages], **given}
        )


def renamed(error: ApiError) -> ApiError:
    """An error of a chat, with this endpoint's names of the fields."""
    field = _FIELDS.get(error.param or "", error.param)
    message = error.message.replace(f"{error.param}:", f"{field}:", 1) if error.param else error.message
    return ApiError(error.status, message, code=error.code, param=field)


class ResponseForm(Form):
    """Writes the answer's object, or its events, of which each has a number."""

    kind, prefix = "response", "resp"

    def __init__(self, asked: ResponsesBody, model: str, spell: Speller, prompt: tuple[int, ...]) -> None:
        super().__init__(model, spell, logprobs=False, token_ids=False, prompts=[prompt], num_siblings=1)
        self._asked, self._text, self._finish, self._number = asked, "", "stop", 0
        self._message_id = f"msg-{uuid.uuid4().hex}"

    def whole(self, pieces: Sequence[ChoicePiece], usage: Usage) -> dict[str, Any]:
        for piece in pieces:
            self._take(piece)
        return self._response(usage)

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        empty = {**self._message("in_progress"), "content": []}
        return [
            self._event("created", response=self._response(None)),
            self._event("in_progress", response=self._response(None)),
            self._event("output_item.added", output_index=0, item=empty),
            self._event("content_part.added", **self._place, part=self._part()),
        ]

    def chunks(self, piece: ChoicePiece) -> list[dict[str, Any]]:
        self._take(piece)
        return [self._event("output_text.delta", **self._place, delta=piece.text, logprobs=[])] if piece.text else []

    def closing(self, usage: Usage, *, shows_usage: bool) -> str:
        response = self._response(usage)
        item = self._message(response["status"])
        last = [
            self._event("output_text.done", **self._place, text=self._text, logprobs=[]),
            self._event("content_part.done", **self._place, part=self._part()),
            self._event("output_item.done", output_index=0, item=item),
            self._event(response["status"], response=response),
        ]
        return "".join(map(event, last))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _take(self, piece: ChoicePiece) -> None:
        self._text += piece.text
        self._finish = piece.finish_reason or self._finish

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _message(self, status: str) -> dict[str, Any]:
        head = {"type": "message", "id": self._message_id, "status": status, "role": "assistant"}
        return {**head, "content": [self._part()]}

    def _response(self, usage: Usage | None) -> dict[str, Any]:
        """The answer's object. `usage` None: it has only begun."""
        asked, is_cut = self._asked, self._finish == "length"
        status = "in_progress" if usage is None else "incomplete" if is_cut else "completed"
        defaults = GenerationBody.model_fields
        text_format = asked.text.format if asked.text is not None else None
        return {
            "id": self.id,
            "object": self.kind,
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": [] if usage is None else [self._message(status)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": defaults["temperature"].default if asked.temperature is None else asked.temperature,
            "text": {"format": (text_format or TextFormat()).model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": defaults["top_p"].default if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
