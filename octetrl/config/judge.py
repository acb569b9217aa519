"""The recipe's `environment.judge` section: a model behind an OpenAI-compatible endpoint scores completions.

See docs/environment_tools.md.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from octetrl.config.section import Section
from octetrl.system.address import HOW, is_address

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
    base_url: str
    """Address including /v1, such as http://localhost:8000/v1. It must not contain a user or a key."""
    model: str
    """The model's name at the endpoint."""
    kind: Literal["chat", "reward_model"] = "chat"
    """chat: the model gets `template` and replies with a text that contains the score. reward_model: the model gets
    prompt and completion as messages at `path`, and returns a number."""
    template: str = TEMPLATE
    """Question to the judge. {prompt} and {answer} stand for the task's, {completion} for the policy's."""
    pattern: str = r"(?i)score[\s:=*_]{0,8}(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, which captures the score. The last match in the judge's reply counts. The
    judge's thoughts are not searched."""
    json_key: str | None = None
    """Key of the score in the reply's last JSON object with this key. null: `pattern` finds the score."""
    lowest: float = 0.0
    """Score that maps to reward 0, for kind chat. A lower score is an error and is not clipped."""
    highest: float = 10.0
    """Score that maps to reward 1, for kind chat."""
    path: str = "/pooling"
    """For kind reward_model: path on the server. With a leading slash it replaces /v1."""
    value_at: str = "data.0.data"
    """For kind reward_model: place of the number in the response, as keys and positions joined by dots."""
    api_key_variable: str | None = None
    """Environment variable that holds the key, such as OPENAI_API_KEY; null: no key is sent."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of the judge. At 0, equal completions are judged only once."""
    max_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    """Token limit of the judge's reply."""
    timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Time limit of each attempt, in seconds, for the whole answer. An attempt that exceeds it counts as failed and is
    retried."""
    retries: int = Field(default=3, ge=0, le=1_000)
    """Number of retries if the endpoint cannot be reached, exceeds `timeout_seconds`, is busy, or fails (status 408,
    409, 429, 5xx)."""
    backoff_seconds: float = Field(default=1.0, ge=0.0, le=1e6)
    """Wait before the first retry, in seconds. It doubles with each retry, up to a minute."""
    concurrency: int = Field(default=16, ge=1, le=4_096)
    """Number of requests in flight at once."""

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, base_url: str) -> str:
        if not is_address(base_url):
            raise ValueError(f"it is not an address; {HOW}")
        return base_url

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
            raise ValueError(f"it is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"it has {groups} groups; it needs exactly one, around the score")
        return pattern

    @field_validator("highest")
    @classmethod
    def _is_above_lowest(cls, highest: float, info: object) -> float:
        lowest = getattr(info, "data", {}).get("lowest", 0.0)
        if highest <= lowest:
            raise ValueError(f"it must be above lowest, which is {lowest:g}")
        return highest
