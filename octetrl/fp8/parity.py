"""Where a run promises equal log-probs on both sides, and where a GPU can run its fused forwards.

These are the only two places that decide it: `octetrl check`, the run and the worker all ask here. Torch-free, so that
`octetrl check` can answer without building anything.
"""

from __future__ import annotations

from octetrl.config.schema import Recipe
from octetrl.fp8.policy import PrecisionPolicy, Side


def why_not_equal(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool) -> str | None:
    """Why the trainer's log-probs of samples drawn with its weights may differ from the engine's, or None where they
    are promised to be the same bits (docs/parity.md)."""
    if recipe.algorithm.learns_from != "rollouts":
        return f"{recipe.algorithm.name} draws no rollouts, so there is nothing to compare"
    if policy.numerics != "parity":
        return "the faster sums are equal to rounding alone (numerics: fast)"
    if not policy.same_on_both_sides:
        return "linears are FP8 on one side alone"
    if policy.kv_mode != "none" and not recipe.fp8.kv_replay:
        return "training does not see the FP8 cache (fp8.kv_replay: false)"
    if recipe.engine.prefix_cache == "keep":
        return "pages outlive the weights that made them (engine.prefix_cache: keep)"
    if on_gpu:
        return why_not_fused(recipe, policy, "train")
    return None


def why_not_fused(recipe: Recipe, policy: PrecisionPolicy, side: Side) -> str | None:
    """Why one side of a run on a GPU takes the modules of `models/decoder.py` instead of the fused forwards, which are
    faster and keep one order of sums; None where it runs fused. `can_fuse` (models/rollout_forward.py) says the same
    of a built model."""
    if recipe.model.dtype != "bfloat16":
        return f"the fused kernels of a GPU are for BF16 (model.dtype: {recipe.model.dtype})"
    if recipe.fp8.emulate is True and policy.uses_fp8(side):
        return "emulated FP8 has no fused kernels on a GPU (fp8.emulate: true)"
    return None


def refused_gate(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool) -> str | None:
    """What is wrong with an explicit `mismatch.fail_on_difference: true`: it would never end a run that promises
    nothing. None where nothing is wrong."""
    why = why_not_equal(recipe, policy, on_gpu=on_gpu)
    if recipe.mismatch.fail_on_difference is not True or why is None:
        return None
    return (
        f"mismatch.fail_on_difference: true can never stop this run, equal log-probs are not promised: {why};"
        f" set it to auto, or change that"
    )


def slow_paths(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool, trains: bool = True) -> list[str]:
    """One line for each side of a run on a GPU that goes without its fused forward."""
    if not on_gpu:
        return []
    names: dict[Side, str] = {"rollout": "rollouts", "train": "training"}
    if not trains:
        del names["train"]
    elif recipe.algorithm.learns_from != "rollouts":
        del names["rollout"]
    reasons = {name: why_not_fused(recipe, policy, side) for side, name in names.items()}
    return [f"{name}: a slower forward, without the fused kernels: {why}" for name, why in reasons.items() if why]
