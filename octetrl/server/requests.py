"""Bodies of requests: the supported fields, their limits, and their conversion for the engine.

An unsupported field that would change the answer is an error that names the field. Fields without effect here (`user`,
`metadata`, ...) are accepted and ignored, and so are values that change nothing (`use_beam_search: false`). Fields in
addition to OpenAI's, with vLLM's names: `top_k`, `min_p`, `min_tokens`, `repetition_penalty`, `stop_token_ids`,
`ignore_eos`, `prompt_logprobs`, `return_token_ids` and `chat_template_kwargs`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from octetrl.config.limits import MOST_TEMPERATURE
from octetrl.engine.admission import LEAST_REPETITION, MOST_TOP, MOST_TOP_K
from octetrl.environments.tools.formats.reading import ToolFormat
from octetrl.records import LogitOptions, SamplingParams
from octetrl.server.answer_grammars import ResponseFormat, ToolChoice, call_grammar, format_grammar
from octetrl.server.errors import ApiError, wrong

COMPLETION_TOKENS = 16  # default of max_tokens for /v1/completions, as in OpenAI's API
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
NumTop = Annotated[int, Field(ge=0, le=MOST_TOP)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=16)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted and ignored


class GenerationBody(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None  # None: the server's
    n: int = Field(default=1, ge=1)
    temperature: Number = Field(default=1.0, ge=0.0, le=MOST_TEMPERATURE)
    top_p: Number = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1, le=MOST_TOP_K)
    min_p: Number = Field(default=0.0, ge=0.0, le=1.0)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: Stops = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    min_tokens: int = Field(default=0, ge=0)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Number = Field(default=1.0, ge=LEAST_REPETITION, le=10.0)
    logit_bias: Annotated[dict[TokenId, Annotated[Number, Field(ge=-100, le=100)]], Field(max_length=1024)] = {}
    prompt_logprobs: NumTop | None = None
    skip_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    truncate_prompt_tokens: None = None
    spaces_between_special_tokens: Any = None
    request_id: Any = None
    priority: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @field_validator(
        "n", "temperature", "top_p", "top_k", "min_p", "stream", "ignore_eos", "min_tokens", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "return_token_ids", mode="before",
    )  # fmt: skip
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

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens to report with each token of the answer."""
        return 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None

    def _logit_options(self, grammar: str | None) -> LogitOptions | None:
        options = LogitOptions(
            min_new_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            grammar=grammar,
            num_top=max(self.num_top, self.prompt_logprobs or 0),
            prompt_logprobs=self.wants_prompt_logprobs,
        )
        return None if options == LogitOptions() else options

    def sampling(self, max_new_tokens: int, grammar: str | None = None) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logits=self._logit_options(grammar),
        )

    def drawn_seed(self) -> int:
        """Return the request's seed, or a random one."""
        return secrets.randbits(63) if self.seed is None else self.seed


class CompletionBody(GenerationBody):
    """/v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = Field(default=None, ge=0)  # 0: only the prompt's log-probs
    logprobs: NumTop | None = None
    echo: bool = False
    best_of: Literal[1] | None = None
    suffix: None = None
    add_special_tokens: Literal[True] | None = None

    @field_validator("echo", mode="before")
    @classmethod
    def _null_is_no(cls, value: Any) -> Any:
        return False if value is None else value

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)

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
    function: dict[str, Any]  # with its keys in the client's order, as the chat template will write them

    @field_validator("function")
    @classmethod
    def _can_be_called(cls, function: dict[str, Any]) -> dict[str, Any]:
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise ValueError("'name' is needed, a text that is not empty")
        if parameters is not None and not isinstance(parameters, dict):
            raise ValueError("'parameters' is a JSON schema, so an object is needed")
        return function


class ChatBody(GenerationBody):
    """/v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    echo: Literal[False] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it has no effect without logprobs: true")
        return value

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        """JSON schemas of the tools. None: no tool may be called."""
        return [tool.model_dump() for tool in self.tools] if self.tools and self.tool_choice != "none" else None

    @property
    def demanded_functions(self) -> list[dict[str, Any]]:
        """Functions of which one must be called; empty if the model may answer with text. Raises ApiError."""
        functions = [tool.function for tool in self.tools or []]
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            named = [function for function in functions if function.get("name") == name]
            if not named:
                known = ", ".join(str(function.get("name")) for function in functions) or "none"
                raise wrong("tool_choice", f"tool_choice: there is no tool {name!r}; the tools are: {known}")
            return named
        if self.tool_choice == "required":
            if not functions:
                raise wrong("tool_choice", "tool_choice: 'required' needs tools; give at least one")
            return functions
        return []


class TokenizeBody(BaseModel):
    """/tokenize, as vLLM has it: `prompt` or `messages`."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True  # of a prompt; a chat template writes its own
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """/detokenize, as vLLM has it."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[TokenId]


Body = TypeVar("Body", bound=BaseModel)


def grammar_of(body: GenerationBody, tool_format: ToolFormat | None) -> str | None:
    """The grammar that the answer must match, or None. `tool_format`: of the model's calls. Raises ApiError."""
    demanded = body.demanded_functions if isinstance(body, ChatBody) else []
    try:
        wanted = format_grammar(body.response_format)
    except ValueError as error:
        raise wrong("response_format", str(error), "invalid_value") from None
    if not demanded:
        if isinstance(body, ChatBody) and body.tools and body.parallel_tool_calls is False:
            raise wrong(
                "parallel_tool_calls",
                "parallel_tool_calls: false is supported only with a tool_choice that demands a call",
                "unsupported_value",
            )
        return wanted
    if wanted is not None:
        raise wrong("response_format", "response_format: a call is demanded by tool_choice; leave one of them out")
    assert tool_format is not None, "tools of a model without a form of calls are refused before"
    assert isinstance(body, ChatBody)
    one = body.parallel_tool_calls is False or isinstance(body.tool_choice, ToolChoice)
    try:
        return call_grammar(demanded, tool_format, several=not one)
    except ValueError as error:
        raise wrong("tools", str(error), "invalid_value") from None


def parse_body(kind: type[Body], body: bytes | Mapping[str, Any]) -> Body:
    """Parse a body, or fields that another endpoint has read. Raises ApiError that names the first wrong field."""
    try:
        return kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate(body)
    except ValidationError as error:
        raise _first_problem(kind, error) from error


def _first_problem(kind: type[BaseModel], error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False, include_context=False)[0]
    where = [str(part) for part in problem["loc"]]
    param = where[0] if where else None
    if param is None:
        return wrong(None, f"the body is not a valid JSON object: {problem['msg']}")
    given = repr(problem.get("input"))
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return wrong(param, f"{'.'.join(where)}: it is missing", "missing_required_parameter")
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(kind.model_fields))
        return wrong(param, f"{'.'.join(where)}: it is not supported; the fields are {known}", "unknown_parameter")
    if problem["type"] == "literal_error" or param == "suffix":
        return wrong(param, f"{'.'.join(where)}: {shown} is not supported; {problem['msg']}", "unsupported_value")
    return wrong(param, f"{'.'.join(where)}: {shown} is not valid; {reason}", "invalid_value")
