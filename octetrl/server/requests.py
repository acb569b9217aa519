"""Bodies of requests: the supported fields, their limits, and their conversion for the engine.

An unsupported field that would change the answer is an error that names the field. Fields without effect here (`user`,
`metadata`, ...) are accepted and ignored. Fields in addition to OpenAI's: `top_k`, `min_p`, `stop_token_ids`,
`ignore_eos`, `return_token_ids` and `chat_template_kwargs`.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from octetrl.records import SamplingParams
from octetrl.server.errors import ApiError, wrong

COMPLETION_TOKENS = 16  # default of max_tokens for /v1/completions, as in OpenAI's API
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted and ignored


class GenerationBody(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int = Field(default=1, ge=1)
    temperature: Number = Field(default=1.0, ge=0.0, le=10.0)
    top_p: Number = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    min_p: Number = Field(default=0.0, ge=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default=[], max_length=16)
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @field_validator("n", "temperature", "top_p", "top_k", "min_p", "stream", "ignore_eos", mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [] if value is None else [value] if isinstance(value, str) else value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    def drawn_seed(self) -> int:
        """Return the request's seed, or a random one."""
        return secrets.randbits(63) if self.seed is None else self.seed


class CompletionBody(GenerationBody):
    """/v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Literal[0] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    name: str
    arguments: str


class AssistantCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a chat. Clients may send back further fields of an answer (`refusal`, ...), which are ignored."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[AssistantCall] | None = None
    tool_call_id: str | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: dict[str, Any]


class ResponseFormat(BaseModel):
    type: Literal["text"]


class ChatBody(GenerationBody):
    """/v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """JSON schemas of the tools. None: no tool may be called."""
        return [tool.model_dump() for tool in self.tools] if self.tools and self.tool_choice != "none" else None


Body = TypeVar("Body", bound=GenerationBody)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse a body. Raises ApiError that names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _first_problem(kind, error) from error


def _first_problem(kind: type[Body], error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_context=False)[0]
    where = [str(part) for part in problem["loc"]]
    param = where[0] if where else None
    if param is None:
        return wrong(None, f"the body is not a valid JSON object: {problem['msg']}")
    given = repr(problem.get("input"))
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    if problem["type"] == "missing":
        return wrong(param, f"{'.'.join(where)}: it is missing", "missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(kind.model_fields))
        return wrong(param, f"{'.'.join(where)}: it is not supported; the fields are {known}", "unknown_parameter")
    if problem["type"] == "literal_error" or param == "suffix":
        return wrong(param, f"{'.'.join(where)}: {shown} is not supported; {problem['msg']}", "unsupported_value")
    return wrong(param, f"{'.'.join(where)}: {shown} is not valid; {problem['msg']}", "invalid_value")
