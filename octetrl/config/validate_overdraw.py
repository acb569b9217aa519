"""Check that a step can leave out its slowest groups (`rollout.overdraw`)."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.objective_settings import refills_of
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem

_FIELD = "rollout.overdraw"


def overdrawn(prompts: int, overdraw: float) -> int:
    """Prompts that a step draws."""
    return int(prompts * overdraw + 1e-9)


def describe_overdraw(recipe: Recipe) -> str | None:
    """How many prompts a step draws and how many it keeps, and what that costs. None without over-drawing."""
    rollout = recipe.rollout
    if rollout.overdraw == 1.0 or recipe.algorithm.learns_from != "rollouts":
        return None
    prompts, drawn = rollout.prompts_per_step, overdrawn(rollout.prompts_per_step, rollout.overdraw)
    verb = "is" if drawn - prompts == 1 else "are"
    later = f"{verb} drawn again in the next step"
    if rollout.overdraw_return == "long_step":
        later = f"{verb} drawn again once they fill a step"
    return (
        f"{drawn} prompts are drawn, the {prompts} groups with the shortest answers are trained on,"
        f" {drawn - prompts} {later}; so a step prefers short answers"
    )


def overdraw_problems(recipe: Recipe) -> Iterator[Problem]:
    overdraw, prompts = recipe.rollout.overdraw, recipe.rollout.prompts_per_step
    if overdraw == 1.0:
        if recipe.rollout.overdraw_return != "next_step":
            text = f"rollout.overdraw_return: it has no effect while {_FIELD} is 1; set that to 1.2, or remove this"
            yield Problem(("rollout.overdraw_return", _FIELD), text)
        return
    given = f"{_FIELD}: {overdraw:g}"
    if overdrawn(prompts, overdraw) == prompts:
        text = f"{given} of {prompts} prompts is no prompt more; raise rollout.prompts_per_step, or set it to 1"
        yield Problem((_FIELD, "rollout.prompts_per_step"), text)
    refills = refills_of(recipe.algorithm)
    if refills:
        text = (
            f"{given} leaves out slow groups, and algorithm.max_refills: {refills} draws until enough groups are kept;"
            " they exclude each other, so set overdraw to 1, or max_refills to 0"
        )
        yield Problem((_FIELD, "algorithm.max_refills"), text)
    if recipe.cluster.max_staleness:
        text = (
            f"{given} puts slow groups into the next step, and with cluster.max_staleness:"
            f" {recipe.cluster.max_staleness} that step is already drawn beside this one; set overdraw to 1, or"
            " max_staleness to 0"
        )
        yield Problem((_FIELD, "cluster.max_staleness"), text)
    if recipe.environments:
        text = (
            f"{given} would move the shares of several environments towards those with short answers; set it to 1, or"
            " give one environment"
        )
        yield Problem((_FIELD, "environments"), text)
