"""Whether a run promises bit-equal log-probs on both sides or only measures how far they differ, and when a GPU can run
the fused forwards.

Only this file decides either question. `octetrl check`, the run and the worker all call it. It does not import torch,
so `octetrl check` can answer before anything is built.
"""

from __future__ import annotations

from typing import Literal

from octetrl.config.schema import Recipe
from octetrl.fp8.policy import PrecisionPolicy, Side

Parity = Literal["promised", "measured"]


def parity_of(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool) -> Parity:
    """Whether the trainer's and the engine's log-probs of a sample have the same bits under the same weights
    (docs/parity.md), so that one token that differs may end the run. Otherwise the mismatch is only measured."""
    return "promised" if why_measured(recipe, policy, on_gpu=on_gpu) is None else "measured"


def why_measured(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool) -> str | None:
    """Why `parity_of` is "measured". None if it is "promised"."""
    if recipe.algorithm.learns_from != "rollouts":
        return f"{recipe.algorithm.name} samples no rollouts to compare"
    if recipe.engine.backend != "octetrl":
        return f"its kernels add in other orders than the trainer's (engine.backend: {recipe.engine.backend})"
    if not policy.same_on_both_sides:
        return "linears are FP8 on one side only"
    if policy.kv_mode != "none" and not recipe.fp8.kv_replay:
        return "training does not see the FP8 cache (fp8.kv_replay: false)"
    if recipe.engine.prefix_cache == "keep":
        return "cached pages are kept when the weights change (engine.prefix_cache: keep)"
    if on_gpu:
        return why_no_fixed_order(recipe, policy, "train")
    return None


def why_not_fused(recipe: Recipe, policy: PrecisionPolicy, side: Side) -> str | None:
    """Why one side of a run on a GPU uses the modules of `models/decoder.py` and not the fused forwards, which are
    faster and keep one order of sums. None if it runs fused. `can_fuse` (models/rollout_forward.py) and
    `fused_layer_runner` (models/training_forward.py) answer the same question for a built model."""
    why = why_no_fixed_order(recipe, policy, side)
    size = recipe.cluster.tensor_parallel
    if why is None and size > 1 and side == "train":
        why = f"its backward does not exchange the parts of a model yet (cluster.tensor_parallel: {size})"
    return why


def why_no_fixed_order(recipe: Recipe, policy: PrecisionPolicy, side: Side) -> str | None:
    """Why a row's bits may depend on the other rows of a forward on a GPU. None if all its sums have one order."""
    if recipe.model.dtype != "bfloat16":
        return f"the fused kernels of a GPU are for BF16 (model.dtype: {recipe.model.dtype})"
    if recipe.fp8.is_emulated is True and policy.uses_fp8(side):
        why = "fp8.format: mxfp8" if policy.mx else "fp8.emulate: true"
        return f"emulated FP8 has no fused kernels on a GPU ({why})"
    return None


def refused_gate(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool) -> str | None:
    """What is wrong with an explicit `mismatch.fail_on_difference: true`: it would never end a run that promises
    nothing. None if nothing is wrong."""
    why = why_measured(recipe, policy, on_gpu=on_gpu)
    if recipe.mismatch.fail_on_difference is not True or why is None:
        return None
    return (
        f"mismatch.fail_on_difference: true cannot stop this run, because equal log-probs are not promised: {why};"
        f" set it to auto, or change that setting"
    )


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
