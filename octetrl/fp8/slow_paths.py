"""When a GPU can run the fused forwards. Only this file decides, before anything is built and without torch."""

from __future__ import annotations

from octetrl.config.schema import Recipe
from octetrl.fp8.parity import why_no_fixed_order
from octetrl.fp8.policy import PrecisionPolicy, Side


def why_not_fused(recipe: Recipe, policy: PrecisionPolicy, side: Side) -> str | None:
    """Why one side of a run on a GPU uses the modules of a decoder and not the fused forwards, which are faster.

    None if it runs fused. `can_fuse` (models/rollout_forward.py) and `fused_layer_runner` (models/training_forward.py)
    answer the same question for a built model."""
    if policy.modules_of is not None:
        return f"transformers' modules compute its layers (model.implementation: {recipe.model.implementation})"
    why = why_no_fixed_order(recipe, policy, side)
    size = recipe.cluster.tensor_parallel
    if why is None and size > 1 and side == "train":
        why = f"its backward does not exchange the parts of a model yet (cluster.tensor_parallel: {size})"
    return why


def slow_paths(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool, trains: bool = True) -> list[str]:
    """One line for each side of a run on a GPU that cannot use its fused forward."""
    if not on_gpu:
        return []
    names: dict[Side, str] = {"rollout": "rollouts", "train": "training"}
    if not trains:
        del names["train"]
    elif recipe.algorithm.learns_from != "rollouts":
        del names["rollout"]
    reasons = {name: why_not_fused(recipe, policy, side) for side, name in names.items()}
    return [f"{name}: a slower forward, without the fused kernels: {why}" for name, why in reasons.items() if why]
