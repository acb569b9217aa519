"""/v1/responses, OpenAI's newer API: text and functions, whole or streamed.

    body -> the same chat as /v1/chat/completions -> output items: one message, and a `function_call` for each call

Nothing is stored: each request brings its whole conversation. What would need a store (`previous_response_id`,
`background`), images, and tools that a provider runs itself are refused. Reasoning items are left out.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from octetrl.config.limits import MOST_TEMPERATURE
from octetrl.environments.tools.formats.reading import ToolCall
from octetrl.server.answers import Form, Speller, Usage, event
from octetrl.server.choices import ChoicePiece
from octetrl.server.errors import ApiError
from octetrl.server.requests import ChatBody, GenerationBody, Number, parse_body

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


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutput(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]


class ReasoningItem(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


Item = FunctionCall | FunctionOutput | ReasoningItem | InputMessage


class ResponseTool(BaseModel):
    model_config = ConfigDict(extra="ignore")  # strict

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def as_in_a_chat(self) -> dict[str, Any]:
        given = {"description": self.description, "parameters": self.parameters}
        kept = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **kept}}


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: str


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
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: Number | None = Field(default=None, ge=0.0, le=MOST_TEMPERATURE)
    top_p: Number | None = Field(default=None, gt=0.0, le=1.0)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    reasoning: Any = None
    include: Any = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = None
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
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages += [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _chat_of(self.input)
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.tools:
            choice = self.tool_choice
            named = (
                {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else choice
            )
            given |= {"tools": [tool.as_in_a_chat for tool in self.tools], "tool_choice": named}
        if self.text is not None and self.text.format is not None:
            given["response_format"] = self.text.format.as_in_a_chat
        return parse_body(ChatBody, {"model": self.model, "messages": messages, **given})


def _chat_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages of a chat. Calls belong to the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case InputMessage():
                messages.append({"role": item.role, "content": item.text})
            case FunctionOutput():
                text = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            case FunctionCall():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def renamed(error: ApiError) -> ApiError:
    """An error of a chat, with this endpoint's names of the fields."""
    field = _FIELDS.get(error.param or "", error.param)
    message = error.message.replace(f"{error.param}:", f"{field}:", 1) if error.param else error.message
    return ApiError(error.status, message, code=error.code, param=field)


class ResponseForm(Form):
    """Writes the answer's object, or its events, of which each has a number."""

    kind, prefix = "response", "resp"

    def __init__(
        self, asked: ResponsesBody, model: str, spell: Speller, prompt: tuple[int, ...], call_ids: str = "any"
    ) -> None:
        super().__init__(
            model, spell, logprobs=False, token_ids=False, prompts=[prompt], num_siblings=1, call_ids=call_ids
        )
        self._calls: list[ToolCall] = []
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
        ]
        for index, call in enumerate(self._function_calls(), 1):
            place = {"item_id": call["id"], "output_index": index}
            begun = {**call, "arguments": "", "status": "in_progress"}
            last += [
                self._event("output_item.added", output_index=index, item=begun),
                self._event("function_call_arguments.delta", **place, delta=call["arguments"]),
                self._event("function_call_arguments.done", **place, name=call["name"], arguments=call["arguments"]),
                self._event("output_item.done", output_index=index, item=call),
            ]
        last.append(self._event(response["status"], response=response))
        return "".join(map(event, last))

    def _function_calls(self) -> list[dict[str, Any]]:
        """The output items of the calls. A stream always has a message before them."""
        return [
            {
                "type": "function_call",
                "id": f"fc-{self.id[5:]}-{place}",
                "call_id": self.call_id(call, 0, place),
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                "status": "completed",
            }
            for place, call in enumerate(self._calls)
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _take(self, piece: ChoicePiece) -> None:
        self._text += piece.text
        self._finish = piece.finish_reason or self._finish
        self._calls += piece.calls

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
            "output": [] if usage is None else [self._message(status), *self._function_calls()],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "temperature": defaults["temperature"].default if asked.temperature is None else asked.temperature,
            "text": {"format": (text_format or TextFormat()).model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto" if asked.tool_choice is None else asked.model_dump()["tool_choice"],
            "tools": [tool.model_dump() for tool in asked.tools or ()],
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
