"""What a server is asked for one answer, and what its answer must hold.

    answers: tokens    POST completions {prompt: [ids], return_token_ids, logprobs: 0, stop_token_ids, ...}
    answers: text      POST chat/completions {messages, ...}, or completions {prompt: "...", ...} without a template

Each setting is sent under the server's name for it, and none is left out: what the API cannot take is refused before
(config/validate_backend.py, `check_sampling`). With tokens the end of an answer is decided here, token by token, as for
every engine; the server gets the same stop tokens and stop strings, so it stops there too.

Two kinds of failure:

    UserError     no request can succeed: no connection, wrong key, wrong model, a field that the server refuses
    NoAnswer      this request failed, after all retries: the rollout is counted as a generation_error
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from octetrl.backends.openai.text import UNKNOWN, asked_of
from octetrl.config.errors import UserError
from octetrl.config.openai import MOST_STOPS, OpenaiConfig
from octetrl.engine.request import RunningSequence
from octetrl.engine.stopping import Decode
from octetrl.environments.endpoint import Endpoint, EndpointError
from octetrl.records import Completion, FinishReason, GenerationRequest

SECTION = "engine.openai"
STAMP = (0, "of the server")  # policy version and precision digest: nothing is known of its weights
_SHOWN = 160
_REFUSES_ALL = (400, 405, 413, 415, 422, 501)  # statuses of a request that would fail again in any form
_TOO_LONG = ("context_length", "context length", "maximum context", "too long", "max_model_len")


class NoAnswer(RuntimeError):
    """The server gave no usable answer to one request. The text says why, in one line."""


def check_sampling(request: GenerationRequest, config: OpenaiConfig) -> None:
    """Raises UserError for what the server's API cannot take."""
    sampling, text = request.sampling, config.answers == "text"
    rules = (
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


def read(answer: dict[str, Any], config: OpenaiConfig, sibling: RunningSequence, decode: Decode) -> Completion:
    """The completion in a server's answer. Raises UserError, NoAnswer."""
    _check_model(answer, config)
    choice = _choice(answer)
    if config.answers == "tokens":
        return _of_tokens(choice, sibling, decode)
    return _of_text(answer, choice, limit=sibling.limit - sibling.prompt_length)


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


def _check_model(answer: dict[str, Any], config: OpenaiConfig) -> None:
    """OpenAI answers with a dated name of the model: `gpt-4o` may be `gpt-4o-2024-08-06`."""
    found = answer.get("model")
    if found != config.model and not str(found).startswith(f"{config.model}-"):
        raise UserError(
            f"{SECTION}.model: '{config.model}' was asked and {found!r} answered; give the model's own name"
        )


def _choice(answer: dict[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise NoAnswer(f"one choice was asked, and the answer holds {str(answer)[:_SHOWN]}")
    choice: dict[str, Any] = choices[0]
    return choice


def _of_tokens(choice: dict[str, Any], sibling: RunningSequence, decode: Decode) -> Completion:
    """A completion from token ids and log-probs. The text and the reason of the end are computed from the tokens."""
    token_ids: Any = choice.get("token_ids")
    logprobs: Any = (choice.get("logprobs") or {}).get("token_logprobs")
    missing = [name for name, found in (("token_ids", token_ids), ("logprobs", logprobs)) if found is None]
    if missing:
        raise UserError(
            f"{SECTION}.answers: the server gave no {' and no '.join(missing)}, which answers: tokens needs; use a"
            " server that has return_token_ids (octetrl serve, vLLM), or answers: text"
        )
    if not _are(token_ids, int) or not _are(logprobs, float) or len(token_ids) != len(logprobs):
        raise NoAnswer(f"token ids and log-probs do not match: {str(choice)[:_SHOWN]}")
    for token, logprob in zip(token_ids, logprobs, strict=True):
        sibling.token_ids.append(token)
        sibling.logprobs.append(logprob)
        reason = sibling.stopping.after(token, len(sibling.token_ids))
        if reason is not None:  # what the server sampled behind it is dropped
            return sibling.completion(reason, decode, *STAMP)
    raise NoAnswer(
        f"the answer ended after {len(token_ids)} tokens (finish_reason {choice.get('finish_reason')!r}), without a"
        " stop token and before its limit"
    )


def _of_text(answer: dict[str, Any], choice: dict[str, Any], *, limit: int) -> Completion:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    reason = choice.get("finish_reason")
    if not isinstance(text, str) or reason not in (FinishReason.STOP, FinishReason.LENGTH):
        raise NoAnswer(f"no text with finish_reason stop or length: {str(choice)[:_SHOWN]}")
    usage = answer.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(count, int) or count < 0:
        raise UserError(f"{SECTION}: the server gives no usage.completion_tokens, the lengths of its answers")
    if count > limit:
        raise UserError(
            f"{SECTION}: the server answered with {count} tokens where at most {limit} were asked, so it ignores"
            " max_completion_tokens; use a server that has it"
        )
    return Completion((UNKNOWN,) * count, (), text, FinishReason(reason), *STAMP)


def _are(values: Any, kind: type) -> bool:
    """Whether it is a list of finite numbers; `kind` int: of whole ones."""
    kinds = (int,) if kind is int else (int, float)
    return isinstance(values, list) and all(
        isinstance(one, kinds) and not isinstance(one, bool) and math.isfinite(one) for one in values
    )


# ---------------------------------------------------------------- failures


def failure_of(error: EndpointError, config: OpenaiConfig) -> Exception:
    """The error for the user, or that of one request."""
    status, text = error.status, str(error)
    if not error.reached:
        return UserError(f"{SECTION}.base_url: the server cannot be reached ({text}); start it, or correct the address")
    if status in (401, 403):
        variable = config.api_key_variable
        remedy = (
            f"correct the key in {variable}" if variable else f"name the key's variable in {SECTION}.api_key_variable"
        )
        return UserError(f"{SECTION}: the server refuses access ({text}); {remedy}")
    if status == 404:
        known = f"it has no model '{config.model}', or no such path; correct {SECTION}.model or {SECTION}.base_url"
        return UserError(f"{SECTION}.model: {known} ({text})")
    if status in _REFUSES_ALL and not any(word in text.lower() for word in _TOO_LONG):
        return UserError(f"{SECTION}: the server refuses the request ({text}); correct the setting that it names")
    return NoAnswer(text)
