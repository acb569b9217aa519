"""Whether unfinished answers keep their KV cache when new weights arrive in flight (`cluster.weights_in_flight`).

After an update a calibrated cache has other scales. The trainer replays an answer with one set of scales, so the pages
of an answer cannot keep those that they were written with. `keep_cache` then recomputes the cache, and says so.
"""

from __future__ import annotations

from typing import Literal

from octetrl.config.cluster import ClusterConfig
from octetrl.shapes.blocks import KVMode

CACHE_OF_ANSWERS = {"off": None, "recompute_cache": "recomputed with the new weights", "keep_cache": "kept"}


def in_flight(cluster: ClusterConfig, kv_mode: KVMode) -> Literal["off", "recompute_cache", "keep_cache"]:
    """What is in force of `weights_in_flight`. kv_mode: the cache's format, as the model allows it."""
    return cluster.weights_in_flight if cannot_keep(cluster, kv_mode) is None else "recompute_cache"


def cannot_keep(cluster: ClusterConfig, kv_mode: KVMode) -> str | None:
    """Say that the cache is recomputed although the recipe would keep it, and why. None: the recipe gets what it asks
    for."""
    if cluster.weights_in_flight != "keep_cache" or kv_mode != "calibrated":
        return None
    return (
        "cluster.weights_in_flight: keep_cache cannot keep a calibrated KV cache: each update has other scales, and the"
        " trainer replays an answer with one set of them; the cache is recomputed, as with recompute_cache; to keep it,"
        " use fp8.kv_cache=int8, dynamic or none"
    )
