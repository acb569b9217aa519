"""Check that a sandbox's time and memory limits fit within those of a reward.

Otherwise the reward's worker would be killed first, and a fault of the model's code would count as a failure of the
reward.
"""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.schema import Recipe
from octetrl.config.section import Problem

MARGIN_SECONDS = 4.0
"""Time for starting and ending sandboxes, in addition to the code's own limit."""
MARGIN_MIB = 1024
"""Memory for the tests' own sandbox and the worker itself, in addition to the code's own limit."""


def sandbox_problems(recipe: Recipe) -> Iterator[Problem]:
    environment = recipe.environment
    given, needed = environment.reward_timeout_seconds, environment.sandbox.wall_seconds + MARGIN_SECONDS
    if environment.kind == "code" and given < needed:
        text = (
            f"environment.reward_timeout_seconds: {given:g} would kill a sandbox before its wall_seconds"
            f" {environment.sandbox.wall_seconds:g}; raise it to at least {needed:g}, or lower sandbox.wall_seconds"
        )
        yield Problem(("environment.reward_timeout_seconds", "environment.sandbox.wall_seconds"), text)
    given_mib, needed_mib = environment.reward_memory_mib, environment.sandbox.memory_mib + MARGIN_MIB
    if environment.kind == "code" and given_mib < needed_mib:
        text = (
            f"environment.reward_memory_mib: {given_mib} would kill a sandbox before its memory_mib"
            f" {environment.sandbox.memory_mib}; raise it to at least {needed_mib}, or lower sandbox.memory_mib"
        )
        yield Problem(("environment.reward_memory_mib", "environment.sandbox.memory_mib"), text)
