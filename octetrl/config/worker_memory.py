"""Estimates the memory of one of several workers from that of a run with one (memory.py). No torch.

The rows of a trained weight have one owner among the workers that hold the same part of the model. Only the owner has

    the moments and masters of these rows
    their weights, if training is FP8: the other workers have codes alone
    their gradient sums, with `cluster.gradients: sharded`

Every worker has everything else: codes, what is not FP8, activations of its micro-batches, and a KV cache.
"""

from __future__ import annotations

from dataclasses import replace

from octetrl.config.memory import MemoryEstimate, MemoryPart
from octetrl.config.schema import Recipe

PARTLY_OWNED = {"weights": "FP8 linears", "critic": "what an update changes"}


def on_each_worker(recipe: Recipe, estimate: MemoryEstimate, available: int | None) -> MemoryEstimate:
    """The estimate for each worker of `recipe`.

    `estimate`: of one worker that has the same part of the model. `available`: the device's memory. On a GPU a KV cache
    that takes a share of the free memory is larger by what the others own; with None it has no size.
    """
    engine, owners = recipe.engine, recipe.cluster.num_groups
    if owners == 1:
        return estimate
    parts = [_share(part, owners) for part in estimate.parts if part.name != "KV cache"]
    tokens = estimate.kv_cache_tokens
    shares = engine.kv_cache_tokens is None and not recipe.cluster.on_cpus
    if shares and tokens is not None and available is not None:
        free = available - sum(part.num_bytes for part in parts if part.when != "training")
        tokens = int(max(free, 0) * engine.kv_memory_fraction) // max(1, estimate.kv_bytes_per_token)
    if tokens:
        how = f"{tokens:,} tokens of {estimate.kv_bytes_per_token:,} bytes"
        parts.append(MemoryPart("KV cache", tokens * estimate.kv_bytes_per_token, how, "generating"))
    return replace(estimate, parts=tuple(parts), kv_cache_tokens=tokens)


def _share(part: MemoryPart, owners: int) -> MemoryPart:
    if not part.owned_bytes:
        return part
    owned = "it" if part.owned_bytes == part.num_bytes else PARTLY_OWNED[part.name]
    held = part.num_bytes - part.owned_bytes + -(-part.owned_bytes // owners)
    return replace(part, num_bytes=held, how=f"{part.how}; 1/{owners} of {owned}")
