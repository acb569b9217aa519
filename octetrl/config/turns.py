"""The recipe's `environment.turns` section: limits of rollouts with several turns (docs/environments.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section


class TurnsConfig(Section):
    max_turns: int = Field(default=16, ge=1, le=100_000)
    """Largest number of the model's answers in one rollout. A longer rollout gets the status `unfinished` and keeps its
    reward. The same holds for one that reaches model.context_length. Each answer has at most rollout.max_new_tokens."""
    reply_timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Time limit in seconds for the environment's start, each reply and finish. A rollout that exceeds it gets the
    status `environment_timeout`. For rewards see environment.reward_timeout_seconds."""
    tool_timeout_seconds: float = Field(default=30.0, gt=0.0, le=1e6)
    """Time limit of each tool call, in seconds."""
    tool_failure: Literal["end", "tell"] = "end"
    """What to do if a tool raises or hangs. end: end the rollout with the status `tool_error`. tell: report the failure
    to the model and continue. A ToolError and a wrong call are always reported to the model."""
    max_in_flight: int | None = Field(default=None, ge=1, le=10_000_000)
    """Largest number of rollouts in flight at once. Groups start only as a whole. None: all rollouts of a step."""
