"""Estimates the memory of one of several workers from that of a run with one (memory.py). No torch.

Of workers that train and generate, the rows of a trained weight have one owner among the workers that hold the same
part of the model, or in each group of them (`ClusterConfig.num_owners`). Only an owner has

    the moments and masters of these rows
    their weights, if training is FP8: the other workers have codes alone
    their gradient sums, with `cluster.gradients: sharded`

Every worker has everything else: codes, what is not FP8, activations of its micro-batches, and a KV cache.

Of workers with one role (`cluster.roles`), one that

    trains      has what a worker that does both has, without KV cache, vLLM and a reward model that scores
    generates   has codes of FP8 linears and the other weights, as the trainers send them, and a KV cache. No gradients,
                optimizer, activations, reference, teacher or critic, and no BF16 weights of what is trained in FP8

With `cluster.max_staleness` a worker that generates may have a second buffer for new weights (`cluster.weight_buffer`),
which then arrive while answers are generated. Its memory is missing in the KV cache. So `auto` takes it only if the KV
cache of the largest batch still fits beside it, or if it is small. A cache of a fixed size (`engine.kv_cache_tokens`)
cannot make room for a small buffer, so it must fit beside it. Otherwise weights arrive in place, in a pause. The cache
of vLLM has its size before anything is known of other workers, so `auto` always leaves room for the buffer there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octetrl.config.backends import TRAITS
from octetrl.config.lora import adapter_elements
from octetrl.config.memory import (
    CACHE,
    STATES,
    MemoryEstimate,
    MemoryPart,
    Precisions,
    count_weights,
    in_pages,
    kv_bytes_per_token,
    with_kv_cache,
)
from octetrl.config.schema import Recipe
from octetrl.shapes.spec import ModelSpec
from octetrl.system.text import binary_size

PARTLY_OWNED = {"weights": "FP8 linears", "critic": "what an update changes"}


def on_each_worker(recipe: Recipe, estimate: MemoryEstimate, available: int | None) -> MemoryEstimate:
    """The estimate for each worker of `recipe`.

    `estimate`: of one worker that has the same part of the model. `available`: the device's memory. On a GPU a KV cache
    that takes a share of the free memory is larger by what the others own; with None it has no size.
    """
    owners, per_token = recipe.cluster.num_owners, estimate.kv_bytes_per_token
    if owners == 1:
        return estimate
    parts = [_share(part, owners) for part in estimate.parts if part.name != CACHE]
    if not per_token:
        return replace(estimate, parts=tuple(parts))
    on_gpu = not recipe.cluster.on_cpus
    return with_kv_cache(recipe, parts, per_token, available, on_gpu=on_gpu, takes_turns=estimate.takes_turns)


def _share(part: MemoryPart, owners: int) -> MemoryPart:
    if not part.owned_bytes:
        return part
    owned = "it" if part.owned_bytes == part.num_bytes else PARTLY_OWNED[part.name]
    held = part.num_bytes - part.owned_bytes + -(-part.owned_bytes // owners)
    return replace(part, num_bytes=held, how=f"{part.how}; 1/{owners} of {owned}")


SMALL_SHARE = 0.1  # share of the memory for the KV cache


@dataclass(frozen=True, slots=True)
class BufferChoice:
    """`doubles`: there is a second buffer. `why`: of the choice, for the user."""

    doubles: bool
    why: str


def choose_buffer(recipe: Recipe, *, weights: int, cache: int, free: int) -> BufferChoice:
    """Choose for a worker that generates. All in bytes. weights: what an update sends. cache: `batch_cache_bytes`.
    free: memory of the device before the KV cache takes its share."""
    setting, size = recipe.cluster.weight_buffer, binary_size(weights)
    if setting == "double":
        return BufferChoice(True, f"cluster.weight_buffer: double, {size}")
    if setting == "single":
        return BufferChoice(False, "cluster.weight_buffer: single")
    backend = TRAITS[recipe.engine.backend]
    if backend.has_weights:
        return BufferChoice(True, f"{backend.title}'s KV cache leaves {size} for it; with single the cache gets them")
    is_fixed = recipe.engine.kv_cache_tokens is not None
    what = "engine.kv_cache_tokens" if is_fixed else "a whole batch"
    left = max(0, int((free - weights) * recipe.engine.kv_memory_fraction))
    if cache <= left:
        return BufferChoice(True, f"beside its {size} the KV cache of {what}, {binary_size(cache)}, fits")
    if weights <= SMALL_SHARE * free and not is_fixed:
        return BufferChoice(True, f"its {size} are {weights / free:.1%} of the memory for the KV cache")
    why = f"beside a second buffer of {size} the KV cache has {binary_size(left)}, and {what} needs"
    return BufferChoice(False, f"{why} {binary_size(cache)}")


def batch_cache_bytes(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes of the KV cache with which a worker that generates holds its largest batch, or what the recipe sets."""
    engine, rollout, roles = recipe.engine, recipe.rollout, recipe.cluster.roles
    assert roles is not None, "every worker trains and generates"
    each = kv_bytes_per_token(recipe, spec, precisions)
    if engine.kv_cache_tokens is not None:
        return engine.kv_cache_tokens * each
    longest = min(recipe.model.context_length, rollout.max_prompt_tokens + rollout.max_new_tokens)
    return recipe.answers_at_once(roles[1]) * in_pages(recipe, longest) * each


def sent_bytes(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes that an update sends to a worker that generates: codes, scales, and what is not FP8; or adapters."""
    lora = recipe.model.lora
    if lora is not None:
        return recipe.model.value_bytes * adapter_elements(spec, lora)
    codes = count_weights(spec, precisions.fp8_train)
    return codes + 4 * (codes // 128**2) + recipe.model.value_bytes * (spec.num_parameters - codes)


def held_bytes(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes of all weights of a worker that generates, without a second buffer."""
    whole = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": None})})
    adapters = 0 if recipe.model.lora is None else sent_bytes(recipe, spec, precisions)
    own = count_weights(spec, set(precisions.fp8_rollout) - set(precisions.fp8_train))  # codes that the engine makes
    return sent_bytes(whole, spec, precisions) + adapters + own


OF_GENERATING = {CACHE, STATES, "vLLM", "reward model"}
KEPT = {STATES, "CUDA context", "process", "reward model", "vLLM"}  # a worker that only generates has them too


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
        sent = sent_bytes(recipe, spec, precisions)
        parts.append(MemoryPart("second buffer", sent, "new weights, while answers are generated"))
    per_token = estimate.kv_bytes_per_token
    return with_kv_cache(recipe, parts, per_token, available, on_gpu=on_gpu, takes_turns=False)


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
    if own and (recipe.fp8.is_emulated or (recipe.fp8.is_emulated is None and not on_gpu)):
        emulated = count_weights(spec, sent | made)
        parts += [MemoryPart("FP8 values", 8 * emulated, "the codes' values in float64")] if emulated else []
    return parts + [part for part in estimate.parts if part.name in KEPT]
