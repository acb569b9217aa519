"""What workers that only train or only generate cannot do (`cluster.trainer_gpus`, `cluster.engine_gpus`)."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.cluster import ROLE_FIELDS
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem


def role_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what of the recipe does not go with `cluster.roles`."""
    algorithm = recipe.algorithm
    if recipe.cluster.roles is None:
        return
    if algorithm.learns_from != "rollouts":
        text = (
            f"cluster.{_first_role(recipe)}: {algorithm.name} samples no rollouts, so no worker would only generate;"
            " use cluster.gpus or cluster.cpus"
        )
        yield Problem((*ROLE_FIELDS, "algorithm.name"), text)


def _first_role(recipe: Recipe) -> str:
    return "trainer_gpus" if recipe.cluster.trainer_gpus is not None else "trainer_cpus"
