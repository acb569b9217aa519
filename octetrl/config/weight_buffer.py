"""Whether new weights have a second buffer in the workers that generate (`cluster.weight_buffer`). No torch.

With a second buffer, weights arrive while answers are generated. Its memory is missing in the KV cache. So `auto` takes
it only if the KV cache of the largest batch still fits beside it, or if it is small. A cache of a fixed size
(`engine.kv_cache_tokens`) cannot make room for a small buffer, so it must fit beside it. Otherwise weights arrive in
place, in a pause. The cache of vLLM has its size before anything is known of other workers, so `auto` always leaves
room for the buffer there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from octetrl.config.backends import TRAITS
from octetrl.config.lora import adapter_elements
from octetrl.config.memory import Precisions, kv_bytes_per_token
from octetrl.config.schema import Recipe
from octetrl.shapes.spec import ModelSpec
from octetrl.system.text import binary_size

SMALL_SHARE = 0.1  # of the memory for the KV cache


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
    answers = -(-rollout.prompts_per_step * rollout.group_size // roles[1])
    longest = min(recipe.model.context_length, rollout.max_prompt_tokens + rollout.max_new_tokens)
    pages = -(-longest // engine.page_size)
    return min(answers, engine.max_batch) * pages * engine.page_size * each


def sent_bytes(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes that an update sends to a worker that generates: codes, scales, and what is not FP8; or adapters."""
    lora = recipe.model.lora
    if lora is not None:
        return _wide(recipe) * adapter_elements(spec, lora)
    codes = _elements(spec, precisions.fp8_train)
    return codes + 4 * (codes // 128**2) + _wide(recipe) * (spec.num_parameters - codes)


def held_bytes(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes of all weights of a worker that generates, without a second buffer."""
    whole = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": None})})
    adapters = 0 if recipe.model.lora is None else sent_bytes(recipe, spec, precisions)
    own = _elements(spec, set(precisions.fp8_rollout) - set(precisions.fp8_train))  # codes that the engine makes
    return sent_bytes(whole, spec, precisions) + adapters + own


def _elements(spec: ModelSpec, names: Collection[str]) -> int:
    return sum(linear.num_weights for name, linear in spec.linears() if name in set(names))


def _wide(recipe: Recipe) -> int:
    return 2 if recipe.model.dtype == "bfloat16" else 4
