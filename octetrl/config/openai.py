"""The recipe's `engine.openai` section: a server with OpenAI's API that answers for an evaluation (docs/engines.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section

MOST_STOPS = 4  # stop strings that OpenAI's API takes


class OpenaiConfig(Section):
    """The server of `engine.backend: openai`. It answers with weights of its own: nothing is published to it."""

    base_url: str
    """Address including /v1, such as http://localhost:8000/v1. It must not contain a user, a key or a query."""
    model: str = Field(min_length=1)
    """The model's name at the server."""
    answers: Literal["tokens", "text"] = "tokens"
    """What the server gives. tokens: token ids and log-probs (`octetrl serve`, vLLM); `model.path` has its tokenizer.
    text: messages in, text out (any server with OpenAI's chat API); the recipe's model is not used."""
    api_key_variable: str | None = None
    """Environment variable that holds the key, such as OPENAI_API_KEY; null: no key is sent. The key itself is written
    nowhere."""
    concurrency: int = Field(default=64, ge=1, le=4_096)
    """Number of requests in flight at once. Each asks for one answer."""
    timeout_seconds: float = Field(default=600.0, gt=0.0, le=1e6)
    """Time limit of each attempt, in seconds, for the whole answer. An attempt that exceeds it counts as failed and is
    retried."""
    retries: int = Field(default=5, ge=0, le=1_000)
    """Number of retries if the server cannot be reached, exceeds `timeout_seconds`, breaks off an answer, is busy (408,
    409, 429), or fails (5xx)."""
    backoff_seconds: float = Field(default=1.0, ge=0.0, le=1e6)
    """Wait before the first retry, in seconds. It doubles with each retry, up to a minute. A server's Retry-After is
    respected."""

    @property
    def name(self) -> str:
        """How results name what was evaluated."""
        return f"{self.model} at {self.base_url}"
