"""What workers that share one model by rows cannot do yet (`cluster.tensor_parallel`)."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.objective_settings import KlSettings
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.shapes.spec import ModelSpec, allowed_sizes, why_not_cut

FIELD = "cluster.tensor_parallel"


def tensor_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    """Yield what of this model cannot be cut, and what of the recipe needs a whole model on every worker."""
    size = recipe.cluster.tensor_parallel
    if size == 1:
        return
    why = why_not_cut(spec, size)
    if why is not None:
        allowed = " or ".join(str(one) for one in allowed_sizes(spec))
        yield Problem((FIELD,), f"{FIELD}: {size}, but {why}; use {allowed}")
    algorithm = recipe.algorithm
    needs_whole = {
        "algorithm.name": algorithm.name in ("ppo", "reward_model", "distill"),
        "algorithm.reference_every": isinstance(algorithm, KlSettings) and algorithm.reference_every > 0,
        "environment.reward_model": recipe.environment.reward_model is not None,
    }
    if recipe.engine.speculation.name != "none":
        text = (
            f"{FIELD}: engine.speculation {recipe.engine.speculation.name} decides by measured times, which differ"
            " between workers that must run the same forwards; remove engine.speculation, or use tensor_parallel 1"
        )
        yield Problem((FIELD, "engine.speculation.name"), text)
    for field, is_asked in needs_whole.items():
        if is_asked:
            what = f"{field} {algorithm.name}" if field == "algorithm.name" else field
            text = f"{FIELD}: {what} needs a whole model on every worker so far; use tensor_parallel 1, or another one"
            yield Problem((FIELD, field), text)
