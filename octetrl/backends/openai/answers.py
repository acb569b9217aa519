"""What a server is asked for one answer, and what its answer must hold.

    answers: tokens    POST completions {prompt: [ids], return_token_ids, logprobs: 0, stop_token_ids, ...}
    answers: text      POST chat/completions {messages, ...}, or completions {prompt: "...", ...} without a template

Each setting is sent under the server's name for it, and none is left out: what the API cannot take is refused before
(config/rules_running.py, `check_sampling`). With tokens the end of an answer is decided here, token by token, as for
every engine; the server gets the same stop tokens and stop strings, so it stops there too.

Two kinds of failure:

    UserError     no request can succeed: no connection, wrong key, wrong model, a field that the server refuses
    NoAnswer      this request failed, after all retries: the rollout is counted as a generation_error
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octetrl.backends.openai.text import UNKNOWN, asked_of
from octetrl.config.schema import MOST_STOPS, OpenaiConfig
from octetrl.endpoint import Endpoint, EndpointError
from octetrl.engine.request import RunningSequence
from octetrl.engine.stopping import Decode
from octetrl.records import Completion, FinishReason, GenerationRequest
from octetrl.system.errors import UserError

ROUNDING = 1e-3  # a log-prob may be above 0 by a rounding of the server

Logprob = Annotated[float, Field(le=ROUNDING, allow_inf_nan=False)]
Parsed = TypeVar("Parsed", bound="Shape")


class Shape(BaseModel):
    """A record of exact types: no text stands for a number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Logprobs(Shape):
    token_logprobs: list[Logprob] | None = None


class Message(Shape):
    content: str | None = None


class Choice(Shape):
    finish_reason: str | None = None
    text: str | None = None
    message: Message | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None


class Usage(Shape):
    completion_tokens: Annotated[int, Field(ge=0)] | None = None


class Answer(Shape):
    """The answer to `completions` and to `chat/completions`. One choice is asked for."""

    model: str | None = None
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]
    usage: Usage | None = None


class ListedModel(Shape):
    id: str
    max_model_len: Any = None  # vLLM's and ours; others may mean something else by it


class Models(Shape):
    """The answer to `models`."""

    data: list[ListedModel]


def parsed(shape: type[Parsed], answer: dict[str, Any]) -> Parsed:
    """The record. Raises ValueError with one line: the first place that is wrong, why, and what is there."""
    try:
        return shape.model_validate(answer)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise ValueError(f"its {place}: {wrong['msg']}, and it is {_shown(wrong['input'])}") from None


def _shown(value: Any) -> str:
    """A scalar as it is, cut; of anything else the kind, since it may be of any depth and length."""
    if value is None or isinstance(value, bool | int | float | str):
        return _cut(repr(value))
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else type(value).__name__


SECTION = "engine.openai"
STAMP = (0, "of the server")  # policy version and precision digest: nothing is known of its weights
LIMIT = "rollout.max_new_tokens"  # the setting that bounds an answer
_SHOWN = 80
_DATE = r"-(\d{4}-\d{2}-\d{2}|\d{8}|(0[1-9]|1[0-2])[0-3]\d)"  # that a server adds to the model's name
_REFUSES_ALL = (400, 405, 413, 415, 422, 501)  # statuses of a request that would fail again in any form
_TOO_LONG = ("context_length", "context length", "maximum context", "too long", "max_model_len")


class NoAnswer(RuntimeError):
    """The server gave no usable answer to one request. The text says why, in one line."""


def check_sampling(request: GenerationRequest, config: OpenaiConfig) -> None:
    """Raises UserError for what the server's API cannot take."""
    sampling, text = request.sampling, config.answers == "text"
    rules = (
        (bool(request.said[0]), "said (an answer that another engine began)"),
        (sampling.logits is not None, "penalties, grammars and further log-probs"),
        (text and sampling.top_k > 0, "top_k"),
        (text and sampling.min_p > 0, "min_p"),
        (text and bool(sampling.stop_token_ids), "stop_token_ids"),
        (text and sampling.ignore_eos, "ignore_eos"),
        (text and len(sampling.stop) > MOST_STOPS, f"more than {MOST_STOPS} stop strings"),
    )
    for is_wrong, what in rules:
        if is_wrong:
            kind = f"engine.backend: openai with answers: {config.answers}"
            raise UserError(f"request '{request.id}': {what} cannot be asked of {kind}; leave it out")


def ask(endpoint: Endpoint, config: OpenaiConfig, sibling: RunningSequence) -> dict[str, Any]:
    """The server's answer for one sibling, not yet read. Any thread may call it. Raises UserError, NoAnswer."""
    path, body = _asked(config, sibling)
    try:
        return endpoint.post(path, body)
    except EndpointError as error:
        raise failure_of(error, config) from None


def read(
    answer: dict[str, Any], config: OpenaiConfig, sibling: RunningSequence, decode: Decode, vocab_size: int
) -> Completion:
    """The completion in a server's answer. vocab_size: of the recipe's model. Raises UserError, NoAnswer."""
    try:
        found = parsed(Answer, answer)
    except ValueError as error:
        raise NoAnswer(f"the answer is malformed: {error}") from None
    _check_model(found.model, config)
    (choice,) = found.choices
    if config.answers == "tokens":
        return _of_tokens(choice, sibling, decode, vocab_size)
    return _of_text(found, choice, limit=sibling.limit - sibling.prompt_length)


# ---------------------------------------------------------------- requests


def _asked(config: OpenaiConfig, sibling: RunningSequence) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    request = sibling.group.request
    sampling = request.sampling
    limit = sibling.limit - sibling.prompt_length
    body: dict[str, Any] = {
        "model": config.model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sibling_seed(request.seed, sibling.sibling),
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if config.answers == "text":
        fields = asked_of(request.prompt_token_ids)
        is_chat = "messages" in fields
        limits = {"max_completion_tokens" if is_chat else "max_tokens": limit}
        return "chat/completions" if is_chat else "completions", {**body, **fields, **limits}
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.min_p:
        body["min_p"] = sampling.min_p
    return "completions", {
        **body,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": limit,
        "stop_token_ids": sorted(sibling.stopping.stop_token_ids),
        "ignore_eos": True,  # EOS is one of them
        "logprobs": 0,
        "return_token_ids": True,
    }


def sibling_seed(seed: int, sibling: int) -> int:
    """A seed of 63 bits for one sibling; the first has the request's own, as `octetrl serve` draws it."""
    if sibling == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {sibling}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ---------------------------------------------------------------- answers


def _check_model(found: str | None, config: OpenaiConfig) -> None:
    """OpenAI answers with a dated name of the model: `gpt-4o` may be `gpt-4o-2024-08-06`. `gpt-4o-mini` is another."""
    dated = re.compile(re.escape(config.model.removesuffix("-latest")) + _DATE)
    if found != config.model and not dated.fullmatch(found or ""):
        raise UserError(
            f"{SECTION}.model: '{config.model}' was asked and {_cut(repr(found))} answered; give the model's own name"
        )


def _of_tokens(choice: Choice, sibling: RunningSequence, decode: Decode, vocab_size: int) -> Completion:
    """A completion from token ids and log-probs. The text and the reason of the end are computed from the tokens."""
    token_ids = choice.token_ids
    logprobs = None if choice.logprobs is None else choice.logprobs.token_logprobs
    if token_ids is None or logprobs is None:
        missing = [name for name, found in (("token_ids", token_ids), ("logprobs", logprobs)) if found is None]
        raise UserError(
            f"{SECTION}.answers: the server gave no {' and no '.join(missing)}, which answers: tokens needs; use a"
            " server that has return_token_ids (octetrl serve, vLLM), or answers: text"
        )
    if len(token_ids) != len(logprobs):
        raise NoAnswer(f"the answer has {len(token_ids)} token ids and {len(logprobs)} log-probs")
    unknown = [token for token in token_ids if not 0 <= token < vocab_size]
    if unknown:
        raise UserError(
            f"{SECTION}.model: the server answered with token {_cut(str(unknown[0]))}, and model.path has tokens 0 to"
            f" {vocab_size - 1}, so its tokenizer is not the server's; give the server's own model as model.path"
        )
    for token, logprob in zip(token_ids, logprobs, strict=True):
        sibling.token_ids.append(token)
        sibling.logprobs.append(logprob)
        reason = sibling.stopping.after(token, len(sibling.token_ids))
        if reason is not None:  # what the server sampled behind it is dropped
            return sibling.completion(reason, decode, *STAMP)
    raise NoAnswer(
        f"the answer ended after {len(token_ids)} tokens (finish_reason {_cut(repr(choice.finish_reason))}), without a"
        " stop token and before its limit"
    )


def _of_text(answer: Answer, choice: Choice, *, limit: int) -> Completion:
    text = choice.text if choice.message is None else choice.message.content
    reason = choice.finish_reason
    if text is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        found = f"{'no text' if text is None else 'a text'}, finish_reason {_cut(repr(reason))}"
        raise NoAnswer(f"no text with finish_reason stop or length: the answer has {found}")
    count = None if answer.usage is None else answer.usage.completion_tokens
    if count is None:
        raise UserError(f"{SECTION}: the server gives no usage.completion_tokens, the lengths of its answers")
    if count > limit:
        raise UserError(
            f"{SECTION}: the server answered with {_cut(str(count))} tokens where at most {limit} were asked, so it"
            " ignores max_completion_tokens; use a server that has it"
        )
    return Completion((UNKNOWN,) * count, (), text, FinishReason(reason), *STAMP)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# ---------------------------------------------------------------- failures


def failure_of(error: EndpointError, config: OpenaiConfig) -> Exception:
    """The error for the user, or that of one request."""
    status, text = error.status, str(error)
    if not error.reached:
        return UserError(f"{SECTION}.base_url: the server cannot be reached ({text}); start it, or correct the address")
    if status is not None and 300 <= status < 400:
        return UserError(f"{SECTION}.base_url: the server redirects, which is not followed ({text}); give that address")
    if status in (401, 403):
        variable = config.api_key_variable
        remedy = (
            f"correct the key in {variable}" if variable else f"name the key's variable in {SECTION}.api_key_variable"
        )
        return UserError(f"{SECTION}: the server refuses access ({text}); {remedy}")
    if status == 404:
        known = f"it has no model '{config.model}', or no such path; correct {SECTION}.model or {SECTION}.base_url"
        if config.answers == "tokens":
            known += f", or set {SECTION}.answers=text for a server that has chat completions only"
        return UserError(f"{SECTION}.model: {known} ({text})")
    if status in _REFUSES_ALL:
        if any(word in error.body.lower() for word in _TOO_LONG):
            return NoAnswer(f"{text}; lower {LIMIT}, or shorten the prompt")
        names_limit = any(word in error.body for word in ("max_tokens", "max_completion_tokens"))
        remedy = f"lower {LIMIT}" if names_limit else "correct the setting that it names"
        return UserError(f"{SECTION}: the server refuses the request ({text}); {remedy}")
    return NoAnswer(text)
