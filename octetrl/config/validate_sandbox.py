"""Whether a sandbox's time fits into that of a reward: a worker that is killed first would call a hang of the model's
code a failure of the reward."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.problems import Problem
from octetrl.config.schema import Recipe

MARGIN_SECONDS = 4.0
"""For starting sandboxes and ending them, beyond what the code may take."""


def sandbox_problems(recipe: Recipe) -> Iterator[Problem]:
    environment = recipe.environment
    given, needed = environment.reward_timeout_seconds, environment.sandbox.wall_seconds + MARGIN_SECONDS
    if environment.kind == "code" and given < needed:
        text = (
            f"environment.reward_timeout_seconds: {given:g} would cut a sandbox short of its wall_seconds"
            f" {environment.sandbox.wall_seconds:g}; raise it to at least {needed:g}, or lower sandbox.wall_seconds"
        )
        yield Problem(("environment.reward_timeout_seconds", "environment.sandbox.wall_seconds"), text)
