"""`environment.turns`: the limits of a rollout with several turns of model and environment (docs/environments.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section


class TurnsConfig(Section):
    max_turns: int = Field(default=16, ge=1, le=100_000)
    """Largest number of the model's answers in one rollout. A rollout that would go on is `truncated` and keeps its
    reward; so does one that reaches model.context_length. Each answer has at most rollout.max_new_tokens."""
    reply_timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Time limit of each reply, start and finish. A rollout that exceeds it ends as `environment_timeout`. Rewards have
    environment.reward_timeout_seconds."""
    tool_timeout_seconds: float = Field(default=30.0, gt=0.0, le=1e6)
    """Time limit of each tool call."""
    tool_failure: Literal["end", "tell"] = "end"
    """What happens if a tool raises or hangs. end: the rollout ends as `tool_error`. tell: the model is told, and the
    rollout continues. The model is always told about a ToolError and about a wrong call."""
    max_in_flight: int | None = Field(default=None, ge=1, le=10_000_000)
    """Largest number of rollouts in flight at once, in whole groups; None: all of a step."""
