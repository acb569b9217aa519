"""What goes with a mixture of experts, and what a GPU asks of one. No torch: `octetrl check` says it before a run."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.blocks import StackedLinearLayout
from octetrl.config.memory import Precisions
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.config.spec import ModelSpec

BLOCK = 128  # of fp8/format.py, which needs torch
ONLY_BFLOAT16 = (
    "a mixture of experts runs on a GPU in bfloat16, and its FP8 is not emulated there; set model.dtype=bfloat16 and"
    " leave fp8.emulate out, or set cluster.device=cpu"
)


def expert_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    router = recipe.trainer.router
    given = [name for name, value in router if value]
    if given and not spec.has_experts:
        text = f"trainer.router.{given[0]}: this model has no experts; remove the section trainer.router"
        yield Problem((f"trainer.router.{given[0]}",), text)
    elif router.bias_rate and not any(spec.without_gradient()):
        text = (
            f"trainer.router.bias_rate: {router.bias_rate:g}, but the routers of {spec.family} have no correction bias;"
            f" use trainer.router.balance_loss"
        )
        yield Problem(("trainer.router.bias_rate",), text)
    lora = recipe.model.lora
    if router.bias_rate and lora is not None:
        text = (
            f"trainer.router.bias_rate: {router.bias_rate:g} would move the correction biases of the routers, which"
            " model.lora freezes and an adapter's file does not hold; remove one of the two"
        )
        yield Problem(("trainer.router.bias_rate", "model.lora"), text)
    if lora is not None and lora.experts and not spec.has_experts:
        yield Problem(("model.lora.experts",), "model.lora.experts: this model has no experts; set it to false")
    elif lora is not None and lora.experts and lora.rank % 8:
        multiple = -(-lora.rank // 8) * 8
        text = f"model.lora.rank: {lora.rank}, but adapters of experts need a multiple of 8; set it to {multiple}"
        yield Problem(("model.lora.rank", "model.lora.experts"), text)


def experts_refused_on_gpu(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> str | None:
    """Why a GPU does not run this model's experts, as one line; None: it does, or there are none."""
    experts = {name: linear for name, linear in spec.linears() if isinstance(linear, StackedLinearLayout)}
    if not experts:
        return None
    fp8 = [name for name in experts if name in {*precisions.fp8_rollout, *precisions.fp8_train}]
    if recipe.model.dtype != "bfloat16" or (recipe.fp8.emulate and (precisions.fp8_rollout or precisions.fp8_train)):
        return ONLY_BFLOAT16
    return next((text for name in fp8 if (text := widths_refused_in_fp8(name, experts[name])) is not None), None)


def widths_refused_in_fp8(name: str, linear: StackedLinearLayout) -> str | None:
    """Why a GPU does not multiply by these experts in FP8, as one line; None: it does. The widths are the config's, so
    those of gate and up count one by one."""
    multiplied = (linear.in_features, linear.in_features), (linear.parts[0].rows, linear.out_features)
    ragged = dict.fromkeys(f"{width:,}" for width, size in multiplied if size % BLOCK)
    if not ragged:
        return None
    return (
        f"experts with a width of {' and '.join(ragged)} ({name}) do not run in FP8 on a GPU, where their hidden and"
        f" intermediate sizes must be multiples of {BLOCK}; set fp8.ignore=['*.experts.*'], precision=bf16 or"
        f" cluster.device=cpu"
    )
