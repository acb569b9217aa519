"""Rules of a recipe with its model: lengths, adapters, experts, FP8, and the cuts of workers and of vLLM. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from octetrl.config.backends import padded_vocabulary
from octetrl.config.lora import adapter_elements, projections, targets_of, unknown_target
from octetrl.config.memory import Precisions
from octetrl.config.rules import problems_of
from octetrl.config.rules_training import LENGTHS
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.shapes.blocks import StackedLinearLayout
from octetrl.shapes.model_cuts import allowed_sizes, sharing_sizes, why_not_cut, why_not_shared
from octetrl.shapes.spec import ModelSpec

BLOCK = 128  # rows of a block with one scale; of fp8/format.py, which needs torch
ALIGNED = 8  # BF16 values of 16 bytes: TMA reads rows that begin at multiples of them
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose parameters have the same rows here and in vLLM
ONLY_BFLOAT16 = (
    "a mixture of experts runs on a GPU in bfloat16, and its FP8 is not emulated there; set model.dtype=bfloat16 and"
    " leave fp8.emulate out, or set cluster.device=cpu"
)


def spec_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    """Yield the problems that depend on the model's shape.

    An FP8 KV cache is allowed for Qwen2.5: its K stays BF16 and its V is FP8 (fp8/policy.py; `check` prints it)."""
    yield from _lengths(recipe, spec)
    yield from _adapters(recipe, spec)
    yield from expert_problems(recipe, spec)
    size = recipe.cluster.tensor_parallel
    if size > 1 and (why := why_not_cut(spec, size)) is not None:
        allowed = " or ".join(map(str, allowed_sizes(spec)))
        yield _problem("cluster.tensor_parallel", f"{size}, but {why}; use {allowed}")
    context = recipe.cluster.context_parallel
    if isinstance(context, int) and (why := why_not_shared(spec, context)) is not None:
        allowed = " or ".join(("off", *map(str, sharing_sizes(spec))))
        yield _problem("cluster.context_parallel", f"{context}, but {why}; use {allowed}")
    if recipe.engine.backend == "vllm":
        yield from vllm_problems(recipe, spec)
    if recipe.fp8.rollout or recipe.fp8.train:
        yield from _fp8(recipe, spec)


def _problem(fields: str, text: str) -> Problem:
    names = fields.split()
    return Problem(tuple(names), f"{names[0]}: {text}")


def _lengths(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    context, positions = recipe.model.context_length, spec.max_positions
    if context == positions:
        yield from problems_of(LENGTHS, recipe)
    elif context > positions:
        answer = recipe.rollout.max_new_tokens
        lower = f"lower it to {positions}"
        if recipe.rollout.max_prompt_tokens + answer > positions:
            lower += ", and rollout.max_prompt_tokens and max_new_tokens to as many together"
        yield _problem("model.context_length", f"{context} exceeds the model's {positions} positions; {lower}")
    layers = recipe.trainer.checkpointed_layers
    if layers is not None and layers > spec.num_layers:
        text = f"{layers} are more than the model's {spec.num_layers} layers; lower it, or leave it out for all"
        yield _problem("trainer.checkpointed_layers", text)


def _adapters(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    lora = recipe.model.lora
    if lora is None:
        return
    unknown = None if lora.targets is None else unknown_target(lora.targets, spec)
    if unknown is not None:
        yield _problem("model.lora.targets", unknown)
    elif not adapter_elements(spec, lora):
        text = (
            f"{', '.join(targets_of(lora, spec))} exist only in experts; set model.lora.experts=true, or add one of"
            f" {', '.join(projections(spec))}"
        )
        yield _problem("model.lora.targets", text)


def expert_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    router, lora = recipe.trainer.router, recipe.model.lora
    given = [name for name, value in router if value]
    if given and not spec.has_experts:
        yield _problem(f"trainer.router.{given[0]}", "this model has no experts; remove the section trainer.router")
    elif router.bias_rate and not any(spec.without_gradient()):
        text = f"the routers of {spec.family} have no correction bias; use trainer.router.balance_loss"
        yield _problem("trainer.router.bias_rate", text)
    if router.bias_rate and lora is not None:
        text = (
            f"{router.bias_rate:g} would move the correction biases of the routers, which model.lora freezes and an"
            " adapter's file does not hold; remove one of the two"
        )
        yield _problem("trainer.router.bias_rate model.lora", text)
    stacked = (linear for _, linear in spec.linears() if isinstance(linear, StackedLinearLayout))
    if lora is not None and lora.experts and any(linear.files == "stacked" for linear in stacked):
        text = f"an adapter's file has no names for them, since the experts of a layer of {spec.family} are one tensor"
        yield _problem("model.lora.experts", f"{text}; set it to false")
    elif lora is not None and lora.experts and not spec.has_experts:
        yield _problem("model.lora.experts", "this model has no experts; set it to false")
    elif lora is not None and lora.experts and lora.rank % 8:
        text = f"{lora.rank}, but adapters of experts need a multiple of 8; set it to {-(-lora.rank // 8) * 8}"
        yield _problem("model.lora.rank model.lora.experts", text)


def _fp8(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    fp8 = recipe.fp8
    for name, size in spec.linear_sizes().items():
        if size % 16:
            text = f"linears need sizes divisible by 16, but this model's {name} is {size}; use precision: bf16"
            yield _problem("fp8.rollout fp8.train", text)
    kept = fp8.bf16_first_layers + fp8.bf16_last_layers
    if kept >= spec.num_layers:
        text = (
            f"{fp8.bf16_first_layers} and fp8.bf16_last_layers {fp8.bf16_last_layers} of the model's {spec.num_layers}"
            " layers leave no layer in FP8; lower them, or use precision: bf16"
        )
        yield _problem("fp8.bf16_first_layers fp8.bf16_last_layers", text)


# ---------------------------------------------------------------- vLLM


def vllm_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    """Yield what of this model the adapter does not know, or vLLM does not store."""
    for text in _lacks_of_vllm(spec.whole):
        yield _problem("engine.backend", f"vllm {text}; use engine.backend: octetrl")
    size, rows = recipe.cluster.tensor_parallel, padded_vocabulary(spec.vocab_size)
    if rows % size:
        text = f"engine.backend: vllm cuts the vocabulary in equal parts, and {size} does not divide its {rows:,} rows"
        yield _problem("cluster.tensor_parallel engine.backend", f"{text}; use a power of two")
    parts = {part.name: part.rows for _, linear in spec.linears() for part in linear.parts[:-1]}
    for name, rows in parts.items() if recipe.fp8.rollout else ():
        if rows % BLOCK:
            text = f"vllm needs multiples of {BLOCK} rows for FP8, and {name} has {rows}; use precision: bf16"
            yield _problem("engine.backend fp8.rollout", text)
    for tensor in dict.fromkeys(tensor for layer in range(spec.num_layers) for tensor in spec.cached(layer)):
        if recipe.fp8.kv_cache != "none" and tensor.never_fp8 is not None:
            text = f"{tensor.name} must stay BF16 ({tensor.never_fp8})"
            text = f"engine.backend: vllm stores K and V in one format, and {text}; use none"
            yield _problem("fp8.kv_cache engine.backend", text)


def _lacks_of_vllm(spec: ModelSpec) -> Iterator[str]:
    """What vLLM's model of this family lacks, for which it has an assertion at its start or no parameter."""
    family, size = spec.family, spec.hidden_size // spec.num_heads
    if family not in FAMILIES or spec.hf_config is not None:
        yield f"has no names for the parameters of {family}, only for those of {', '.join(FAMILIES)}"
    windows = {getattr(spec.blocks_of(layer).attention, "window", None) for layer in range(spec.num_layers)}
    if len(windows) > 1:
        yield f"has sliding windows in all layers of a {family} or in none, and this model has them in some"
    if family == "qwen3" and spec.o_bias:
        yield "has no bias of o_proj in a qwen3, and this model has one (attention_bias: true)"
    if family == "qwen2" and spec.head_size != size:
        yield (
            f"takes hidden_size / num_attention_heads as the head size of a qwen2, {size} here, and this model's"
            f" head_dim is {spec.head_size}"
        )


# ---------------------------------------------------------------- experts on a GPU


def experts_refused_on_gpu(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> str | None:
    """Why a GPU does not run this model's experts, as one line; None: it does, or there are none."""
    if not spec.has_experts:
        return None
    uses_fp8 = precisions.fp8_rollout or precisions.fp8_train
    if recipe.model.dtype != "bfloat16" or (recipe.fp8.is_emulated and uses_fp8):
        return ONLY_BFLOAT16
    return expert_widths_refused(spec, {*precisions.fp8_rollout, *precisions.fp8_train})


def expert_widths_refused(spec: ModelSpec, fp8: Collection[str]) -> str | None:
    """Why a GPU does not multiply by these experts, as one line; None: it does. `fp8`: the names of linears in FP8."""
    experts = ((name, linear) for name, linear in spec.linears() if isinstance(linear, StackedLinearLayout))
    return next((why for each in experts if (why := _widths_refused(*each, fp8=each[0] in fp8)) is not None), None)


def _widths_refused(name: str, linear: StackedLinearLayout, *, fp8: bool) -> str | None:
    """The widths are the config's, so those of gate and up count one by one."""
    multiplied = (linear.in_features, linear.in_features), (linear.parts[0].rows, linear.out_features)
    multiple = 2 * ALIGNED if fp8 else ALIGNED
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
