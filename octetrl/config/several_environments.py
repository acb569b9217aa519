"""Several environments in one recipe (`environments`): each as a recipe of its own, and what does not go together.

What checks or builds one environment reads `recipe.environment`. For one of several it gets the recipe that has only
this one (`alone`), and its texts name the section that the user wrote (`renamed`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octetrl.config.objective_settings import refills_of
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.system.errors import UserError

SECTIONS = "environments"
_SECTION = re.compile(r"\benvironment(?=\.[a-z]|:)")


def alone(recipe: Recipe) -> dict[str, Recipe]:
    """By name: the recipe as if this were its only environment. A recipe with `environment` is returned under ""."""
    if not recipe.environments:
        return {"": recipe}
    return {
        name: recipe.model_copy(update={"environment": config, "environments": {}})
        for name, config in recipe.environments.items()
    }


def section_name(name: str) -> str:
    """The section of the environment with this name."""
    return f"{SECTIONS}.{name}" if name else "environment"


def renamed(text: str, name: str) -> str:
    """A text about `environment` as one about `environments.NAME`. It names the section in any case."""
    if not name:
        return text
    text = _SECTION.sub(section_name(name), text)
    return text if section_name(name) in text else f"{section_name(name)}: {text}"


@contextmanager
def errors_named(name: str) -> Iterator[None]:
    """A UserError of what is done inside names the section of this environment."""
    try:
        yield
    except UserError as error:
        if not name:
            raise
        raise UserError(renamed(str(error), name)) from error


def problems_of_each(recipe: Recipe, problems: Callable[[Recipe], Iterator[Problem]]) -> Iterator[Problem]:
    """The problems of each environment alone, with the fields and texts of its own section."""
    for name, one in alone(recipe).items():
        for problem in problems(one):
            fields = tuple(_SECTION.sub(section_name(name), f"{field}:")[:-1] for field in problem.fields)
            yield Problem(fields, renamed(problem.text, name))


def never_drawn(recipe: Recipe) -> list[str]:
    """A line for each environment whose weight is too small for a single task in the run.

    Before task n an environment with the share s that had none is behind by s n, and the other K - 1 together by
    1 - s n. So one of them is further behind while s n < 1/K (environments/tasks.py).
    """
    if recipe.algorithm.learns_from != "rollouts":
        return []
    steps, prompts = recipe.steps, recipe.rollout.prompts_per_step
    tasks = steps * prompts * (1 + refills_of(recipe.algorithm))
    total = sum(config.weight for config in recipe.environments.values())
    return [
        f"{section_name(name)}.weight: {config.weight:g} of {total:g} gives '{name}' no task in {steps} steps of"
        f" {prompts} tasks; raise it, or steps"
        for name, config in recipe.environments.items()
        if config.weight / total * tasks < 1 / len(recipe.environments)
    ]
