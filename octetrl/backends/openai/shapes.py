"""The shape of what a server sends: each JSON object is read once, into one of these records, or refused as a whole.

Fields that nothing here reads are ignored, whatever they hold.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROUNDING = 1e-3  # a log-prob may be above 0 by a rounding of the server
_SHOWN = 60

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
        text = repr(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else type(value).__name__
