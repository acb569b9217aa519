"""Loads and tries an objective of the user's own before a run is built: `octetrl check` and the run call this."""

from __future__ import annotations

from octetrl.config.algorithm import OwnObjectiveConfig
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import load_object
from octetrl.environments.scoring import place_of


def try_objective(recipe: Recipe) -> str | None:
    """Import the loss, first in a separate process, check its fields, and call it on made-up tokens.

    Returns what `check` shows, or None for a shipped objective. Raises UserError for anything that is wrong.
    """
    config = recipe.algorithm
    if not isinstance(config, OwnObjectiveConfig):
        return None
    from octetrl.algorithms.own_objective import load_objective, try_loss  # which imports torch

    function = load_object("algorithm.name", config.name, recipe.environment.load_timeout_seconds)
    objective = load_objective(config)
    try_loss(objective, config)
    advantages = "group-relative" if objective.rule is None else "its own"
    return f"{place_of(function)}; {objective.fields!r}; advantages {advantages}"
