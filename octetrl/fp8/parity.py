"""Whether a run promises bit-equal log-probs on both sides or only measures how far they differ.

Only this file decides. `octetrl check`, the run and the worker all call it. It does not import torch, so `octetrl
check` can answer before anything is built. slow_paths.py says when a GPU can run the fused forwards.

capability: compute capability of the GPU; None: not known.
"""

from __future__ import annotations

from typing import Literal

from octetrl.config.schema import Recipe
from octetrl.fp8.architectures import Capability, why_untested
from octetrl.fp8.policy import PrecisionPolicy, Side

Parity = Literal["promised", "measured"]
PROVEN = (  # families of transformers' modules: tests/parity/test_transformers.py, tests/gpu/test_transformers.py
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma3_text", "glm4", "granite", "olmo2", "olmo3",
    "seed_oss", "smollm3",
)  # fmt: skip


def parity_of(recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool, capability: Capability | None = None) -> Parity:
    """Whether the trainer's and the engine's log-probs of a sample have the same bits under the same weights
    (docs/parity.md), so that one token that differs may end the run. Otherwise the mismatch is only measured."""
    return "promised" if why_measured(recipe, policy, on_gpu=on_gpu, capability=capability) is None else "measured"


def why_measured(
    recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool, capability: Capability | None = None
) -> str | None:
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
    if policy.modules_of not in (None, *PROVEN):
        return f"no test compares both sides of transformers' {policy.modules_of} (docs/models.md)"
    return (why_untested(capability) or why_no_fixed_order(recipe, policy, "train")) if on_gpu else None


def why_no_fixed_order(recipe: Recipe, policy: PrecisionPolicy, side: Side) -> str | None:
    """Why a row's bits may depend on the other rows of a forward on a GPU. None if all its sums have one order."""
    if recipe.model.dtype != "bfloat16":
        return f"the fused kernels of a GPU are for BF16 (model.dtype: {recipe.model.dtype})"
    if recipe.fp8.is_emulated is True and policy.uses_fp8(side):
        name, why = ("MXFP8", "fp8.format: mxfp8") if policy.mx else ("emulated FP8", "fp8.emulate: true")
        return f"{name} has no fused kernels on a GPU ({why})"
    return None


def refused_gate(
    recipe: Recipe, policy: PrecisionPolicy, *, on_gpu: bool, capability: Capability | None = None
) -> str | None:
    """What is wrong with an explicit `mismatch.fail_on_difference: true`: it would never end a run that promises
    nothing. None if nothing is wrong."""
    why = why_measured(recipe, policy, on_gpu=on_gpu, capability=capability)
    if recipe.mismatch.fail_on_difference is not True or why is None:
        return None
    return (
        f"mismatch.fail_on_difference: true cannot stop this run, because equal log-probs are not promised: {why};"
        f" set it to auto, or change that setting"
    )
