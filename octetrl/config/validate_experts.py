"""What goes with a mixture of experts, and what a GPU asks of one. No torch: `octetrl check` says it before a run."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from octetrl.config.memory import Precisions
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.shapes.blocks import StackedLinearLayout
from octetrl.shapes.spec import ModelSpec

BLOCK = 128  # of fp8/format.py, which needs torch
ALIGNED = 8  # BF16 values of 16 bytes: TMA reads rows that begin at multiples of them
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
    if not spec.has_experts:
        return None
    if recipe.model.dtype != "bfloat16" or (recipe.fp8.emulate and (precisions.fp8_rollout or precisions.fp8_train)):
        return ONLY_BFLOAT16
    return expert_widths_refused(spec, {*precisions.fp8_rollout, *precisions.fp8_train})


def expert_widths_refused(spec: ModelSpec, fp8: Collection[str]) -> str | None:
    """Why a GPU does not multiply by these experts, as one line; None: it does. `fp8`: the names of linears in FP8."""
    experts = ((name, linear) for name, linear in spec.linears() if isinstance(linear, StackedLinearLayout))
    return next((why for each in experts if (why := _widths_refused(*each, fp8=each[0] in fp8)) is not None), None)


def _widths_refused(name: str, linear: StackedLinearLayout, *, fp8: bool) -> str | None:
    """The widths are the config's, so those of gate and up count one by one."""
    multiplied = (linear.in_features, linear.in_features), (linear.parts[0].rows, linear.out_features)
    multiple = BLOCK if fp8 else ALIGNED
    ragged = dict.fromkeys(f"{width:,}" for width, size in multiplied if size % multiple or width % ALIGNED)
    if not ragged:
        return None
    runs_in_bf16 = fp8 and not any(width % ALIGNED for width, _ in multiplied)
    remedies = (
        "fp8.ignore=['*.experts.*'], precision=bf16 or cluster.device=cpu" if runs_in_bf16 else "cluster.device=cpu"
    )
    return (
        f"experts with a width of {' and '.join(ragged)} ({name}) do not run{' in FP8' if fp8 else ''} on a GPU, where"
        f" their hidden and intermediate sizes must be multiples of {multiple}; set {remedies}"
    )
