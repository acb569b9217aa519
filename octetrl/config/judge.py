"""`environment.judge`: a model behind an OpenAI-compatible endpoint that scores (docs/environment_tools.md)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from octetrl.config.section import Section

TEMPLATE = """You grade an answer to a question. Be strict: what is not shown is not known.

Question:
{prompt}

Reference answer (may be missing):
{answer}

Answer to grade:
{completion}

Say in a sentence or two what is right and wrong with it. Then write, on the last line, "Score: " and a number from 0
(useless) to 10 (perfect)."""


class JudgeConfig(Section):
    base_url: str = Field(pattern=r"^https?://[^/\s@]+(/\S*)?$")
    """Up to and with /v1, as in http://localhost:8000/v1. No user or key in it."""
    model: str
    """As the endpoint calls it."""
    kind: Literal["chat", "reward_model"] = "chat"
    """chat: a model asked by `template`, whose reply has the score in it. reward_model: one that gives a number for
    prompt and completion, as messages, at `path`."""
    template: str = TEMPLATE
    """What the judge is asked: {prompt}, {answer} and {completion} stand for the task's and the policy's."""
    pattern: str = r"(?i)score[\s:=*_]{0,8}(-?\d+(?:\.\d+)?)"
    """Regular expression with one group: the score is the last match of the judge's reply, thoughts left out."""
    json_key: str | None = None
    """The score is at this key of the last JSON object in the reply that has it; null: `pattern` finds it."""
    lowest: float = 0.0
    """The score that is a reward of 0, for kind chat. One below it is refused, not clipped."""
    highest: float = 10.0
    """The score that is a reward of 1."""
    path: str = "/pooling"
    """Of a reward model: what follows the server's address, /v1 left out where it begins with a slash."""
    value_at: str = "data.0.data"
    """Of a reward model: where in the answer the number is, keys and places joined by dots."""
    api_key_variable: str | None = None
    """Environment variable that holds the key, such as OPENAI_API_KEY; null: none is sent."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 also lets equal completions be judged once."""
    max_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    """Of the judge's reply."""
    timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Of each request."""
    retries: int = Field(default=3, ge=0, le=1_000)
    """Further tries where the endpoint can't be reached, is busy, or fails (status 408, 409, 429, 5xx)."""
    backoff_seconds: float = Field(default=1.0, ge=0.0, le=1e6)
    """Wait before the first of them; doubled each time, up to a minute."""
    concurrency: int = Field(default=16, ge=1, le=4_096)
    """Requests under way at once."""

    @field_validator("template")
    @classmethod
    def _shows_the_completion(cls, template: str) -> str:
        if "{completion}" not in template:
            raise ValueError("it has no {completion}, so every completion would look the same")
        return template

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"it has {groups} groups, and needs one, round the score")
        return pattern

    @field_validator("highest")
    @classmethod
    def _is_above_lowest(cls, highest: float, info: object) -> float:
        lowest = getattr(info, "data", {}).get("lowest", 0.0)
        if highest <= lowest:
            raise ValueError(f"it must be above lowest, which is {lowest:g}")
        return highest
