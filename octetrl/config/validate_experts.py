"""What a GPU asks of a mixture of experts. No torch, so that `octetrl check` says it before a model is built."""

from __future__ import annotations

from octetrl.config.blocks import StackedLinearLayout
from octetrl.config.memory import Precisions
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec

BLOCK = 128  # of fp8/format.py, which needs torch
ONLY_BFLOAT16 = (
    "a mixture of experts runs on a GPU in bfloat16, and its FP8 is not emulated there; set model.dtype=bfloat16 and"
    " leave fp8.emulate out, or set cluster.device=cpu"
)


def experts_refused_on_gpu(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> str | None:
    """Why a GPU does not run this model's experts, as one line; None: it does, or there are none."""
    experts = {name: linear for name, linear in spec.linears() if isinstance(linear, StackedLinearLayout)}
    if not experts:
        return None
    fp8 = [name for name in experts if name in {*precisions.fp8_rollout, *precisions.fp8_train}]
    if recipe.model.dtype != "bfloat16" or (recipe.fp8.emulate and (precisions.fp8_rollout or precisions.fp8_train)):
        return ONLY_BFLOAT16
    for name in fp8:
        widths = experts[name].in_features, experts[name].out_features
        if any(width % BLOCK for width in widths):
            return (
                f"experts of {widths[1]:,} x {widths[0]:,} ({name}) do not run in FP8 on a GPU, where both must be"
                f" multiples of {BLOCK}; set fp8.ignore=['*.experts.*'], precision=bf16 or cluster.device=cpu"
            )
    return None
