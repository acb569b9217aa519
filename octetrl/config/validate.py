"""Check a recipe and report all its problems together, one line each, with what to do. No torch.

There are three stages:

    problems.py                names, types and ranges of single fields
    `combination_problems`     combinations of fields that are not allowed: the tables of rules (rules.py)
    `spec_problems`            fields that the given model does not allow (rules_shape.py)

The second stage also runs if the first one found problems. Each problem names its fields, and a problem with a field
that was already reported is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from octetrl.config.problems import name_objective, schema_problems, unreadable_texts, without_nulls
from octetrl.config.rules import problems_of
from octetrl.config.rules_environment import DATASET, ENVIRONMENT, MIXTURE, ONE_OF_SEVERAL
from octetrl.config.rules_running import BESIDE_TAIL, RUNNING, SERVER_TRAINS
from octetrl.config.rules_shape import spec_problems
from octetrl.config.rules_training import MODEL, RUN, TRAINING
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.config.several_environments import problems_of_each
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError


def build_recipe(tree: dict[str, Any], *, training: bool = True) -> tuple[Recipe | None, list[Problem]]:
    """Build the recipe of a merged tree, or return None and all problems. training: see `combination_problems`."""
    if unreadable := list(unreadable_texts(tree)):
        return None, unreadable
    tree = without_nulls(name_objective(tree))
    try:
        recipe = Recipe.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems, sound = schema_problems(error, tree)
        reported = [field for problem in problems for field in problem.fields]
        reported += ["environment"] if any(field.startswith("environments") for field in reported) else []
        rest = [
            problem
            for problem in combination_problems(_recipe_of(sound), training)
            if not any(_overlap(field, other) for field in problem.fields for other in reported)
        ]
        return None, problems + rest
    problems = list(combination_problems(recipe, training))
    return (None if problems else recipe), problems


def _recipe_of(sound: dict[str, Any]) -> Recipe:
    """The recipe without its wrong fields. A section that needs one of them is left out as a whole, and so on."""
    while True:
        try:
            return Recipe.model_validate_json(json.dumps(sound))
        except ValidationError as error:
            _, smaller = schema_problems(error, sound)
            assert smaller != sound, f"nothing is left out for {error}"
            sound = smaller


def _overlap(field: str, other: str) -> bool:
    """Whether both are the same field, or one is a section that contains the other."""
    return field == other or field.startswith(other + ".") or other.startswith(field + ".")


def combination_problems(recipe: Recipe, training: bool = True) -> Iterator[Problem]:
    """Yield the wrong combinations of a recipe whose single fields are valid.

    training: include the rules that only matter for training."""
    yield from problems_of((*MODEL, *(TRAINING if training else ()), *MIXTURE), recipe)
    several = recipe.environments
    draws = several or not training or recipe.algorithm.learns_from == "rollouts" or recipe.draws_evaluations
    rules = (*(DATASET if draws else ()), *ENVIRONMENT, *(ONE_OF_SEVERAL if several else ()))
    yield from problems_of_each(recipe, lambda one: problems_of(rules, one))
    yield from problems_of((*RUNNING, *(BESIDE_TAIL + SERVER_TRAINS if training else ()), *RUN), recipe)


def validate_with_spec(recipe: Recipe, spec: ModelSpec) -> None:
    """Refuse a recipe that does not fit this model. Raises UserError with all problems together."""
    texts = [problem.text for problem in spec_problems(recipe, spec)]
    if texts:
        raise UserError(texts[0] if len(texts) == 1 else "\n  ".join([f"{len(texts)} problems", *texts]))
