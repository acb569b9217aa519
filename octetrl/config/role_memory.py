"""Estimates the memory of a worker that only trains and of one that only generates (`cluster.roles`). No torch.

    trains      what a worker that does both has, without KV cache, vLLM and a reward model that scores
    generates   codes of FP8 linears and the other weights, as the trainers send them, and a KV cache. No gradients,
                optimizer, activations, reference, teacher or critic, and no BF16 weights of what is trained in FP8

With `cluster.max_staleness` a worker that generates may have a second buffer for new weights (weight_buffer.py).
"""

from __future__ import annotations

from dataclasses import replace

from octetrl.config.backends import TRAITS
from octetrl.config.memory import MemoryEstimate, MemoryPart, Precisions, kv_cache_capacity
from octetrl.config.schema import Recipe
from octetrl.config.weight_buffer import BufferChoice, batch_cache_bytes, choose_buffer, held_bytes, sent_bytes
from octetrl.config.worker_memory import on_each_worker
from octetrl.shapes.spec import ModelSpec

OF_GENERATING = {"KV cache", "vLLM", "reward model"}
KEPT = {"CUDA context", "process", "reward model", "vLLM"}  # a worker that only generates has them too
BUFFER = "second buffer"


def of_trainer(recipe: Recipe, estimate: MemoryEstimate) -> MemoryEstimate:
    """The estimate for a worker that only trains. `estimate`: of one worker that does both."""
    each = on_each_worker(recipe, estimate, None)
    parts = tuple(part for part in each.parts if part.name not in OF_GENERATING)
    return MemoryEstimate(parts, 0, 0, takes_turns=True)


def of_engine(
    recipe: Recipe,
    spec: ModelSpec,
    precisions: Precisions,
    estimate: MemoryEstimate,
    *,
    on_gpu: bool,
    available: int | None,
) -> MemoryEstimate:
    """The estimate for a worker that only generates. `available`: the device's memory. With None a KV cache that takes
    a share of it has no size, and a buffer that depends on it has no part."""
    parts = _engine_parts(recipe, spec, precisions, estimate, on_gpu=on_gpu)
    choice = buffer_choice(recipe, spec, precisions, estimate, on_gpu=on_gpu, available=available)
    if choice is not None and choice.doubles:
        parts.append(
            MemoryPart(BUFFER, sent_bytes(recipe, spec, precisions), "new weights, while answers are generated")
        )
    taken = sum(part.num_bytes for part in parts)
    each = estimate.kv_bytes_per_token
    tokens = kv_cache_capacity(recipe, each, on_gpu, None if available is None else available - taken)
    if tokens is not None:
        parts.append(MemoryPart("KV cache", tokens * each, f"{tokens:,} tokens of {each:,} bytes", "generating"))
    return MemoryEstimate(tuple(parts), each, tokens, takes_turns=False)


def buffer_choice(
    recipe: Recipe,
    spec: ModelSpec,
    precisions: Precisions,
    estimate: MemoryEstimate,
    *,
    on_gpu: bool,
    available: int | None,
) -> BufferChoice | None:
    """Whether there is a second buffer, and why. None: nothing is generated ahead, or it depends on unknown memory."""
    cluster = recipe.cluster
    depends = cluster.weight_buffer == "auto" and not TRAITS[recipe.engine.backend].has_weights
    if not cluster.max_staleness or (available is None and depends):
        return None
    parts = _engine_parts(recipe, spec, precisions, estimate, on_gpu=on_gpu)
    return choose_buffer(
        recipe,
        weights=sent_bytes(recipe, spec, precisions),
        cache=batch_cache_bytes(recipe, spec, precisions),
        free=(available or 0) - sum(part.num_bytes for part in parts),
    )


def _engine_parts(
    recipe: Recipe, spec: ModelSpec, precisions: Precisions, estimate: MemoryEstimate, *, on_gpu: bool
) -> list[MemoryPart]:
    """What is allocated before the second buffer and the KV cache."""
    own = recipe.engine.backend == "octetrl"
    held = precisions if own else replace(precisions, fp8_rollout=precisions.fp8_train)  # vLLM quantises for itself
    sent, made = set(held.fp8_train), set(held.fp8_rollout) - set(held.fp8_train)
    how = f"codes and scales of FP8 linears, {recipe.model.dtype} of the others" if sent else recipe.model.dtype
    how += ", and codes that the engine makes" if made else ""
    how += ", and adapters" if recipe.model.lora is not None else ""
    parts = [MemoryPart("weights", held_bytes(recipe, spec, held), how)]
    if own and (recipe.fp8.emulate or (recipe.fp8.emulate is None and not on_gpu)):
        emulated = sum(linear.num_weights for name, linear in spec.linears() if name in sent | made)
        parts += [MemoryPart("FP8 values", 8 * emulated, "the codes' values in float64")] if emulated else []
    return parts + [part for part in estimate.parts if part.name in KEPT]
