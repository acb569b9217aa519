"""`environment.turns`: the limits of a rollout in which model and environment speak by turns (docs/environments.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section


class TurnsConfig(Section):
    max_turns: int = Field(default=16, ge=1, le=100_000)
    """Most answers of the model in one rollout. One that would go on is `truncated`, and keeps its reward, as one that
    reaches model.context_length does. Each answer has at most rollout.max_new_tokens."""
    reply_timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Of each reply, start and finish. A rollout that gets nothing in time ends as `environment_timeout`. Rewards have
    environment.reward_timeout_seconds."""
    tool_timeout_seconds: float = Field(default=30.0, gt=0.0, le=1e6)
    """Of each tool call."""
    tool_failure: Literal["end", "tell"] = "end"
    """What a tool that raises or hangs does: end the rollout as `tool_error`, or have the model told and go on. What a
    tool refuses by ToolError, and calls that the model got wrong, are always told."""
    max_in_flight: int | None = Field(default=None, ge=1, le=10_000_000)
    """Most rollouts under way at once, in whole groups; None: all of a step."""
