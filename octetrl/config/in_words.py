"""What settings mean for a run, in one line each, where that is not what they say by themselves. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from octetrl.config.cluster import ClusterConfig
from octetrl.config.rules import is_set
from octetrl.config.schema import Recipe, SpeculationConfig
from octetrl.shapes.blocks import KVMode

TAIL_SHARE = (
    0.25  # share of `engine.max_batch`: when so few answers of all workers are unfinished, one worker continues
)
CACHE_OF_ANSWERS = {"off": None, "recompute_cache": "recomputed with the new weights", "keep_cache": "kept"}


def range_text(numbers: Sequence[float]) -> str:
    """One number, or the smallest and the largest of several."""
    low, high = min(numbers), max(numbers)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def describe_tail(recipe: Recipe) -> str | None:
    """When a step begins to learn beside its tail. None without it."""
    if not recipe.rollout.learn_beside_tail:
        return None
    return (
        f"when at most {max(1, int(recipe.engine.max_batch * TAIL_SHARE))} answers of all workers are unfinished"
        f" ({TAIL_SHARE:g} of engine.max_batch), one worker samples them to the end and the others train on complete"
        " groups"
    )


def describe_roles(recipe: Recipe) -> str | None:
    """Which workers train and which generate, and how far ahead. None if every worker does both."""
    cluster = recipe.cluster
    if cluster.roles is None:
        return None
    trainers, engines = cluster.roles
    train, generate = _workers(0, trainers, "train"), _workers(trainers, engines, "generate")
    return f"{train}, {generate}; cluster.max_staleness: {cluster.max_staleness}"


def _workers(first: int, count: int, do: str) -> str:
    if count == 1:
        return f"worker {first} {do}s"
    return f"workers {first} {'and' if count == 2 else 'to'} {first + count - 1} {do}"


def in_flight(cluster: ClusterConfig, kv_mode: KVMode) -> Literal["off", "recompute_cache", "keep_cache"]:
    """What is in force of `weights_in_flight`. kv_mode: the cache's format, as the model allows it."""
    return cluster.weights_in_flight if cannot_keep(cluster, kv_mode) is None else "recompute_cache"


def cannot_keep(cluster: ClusterConfig, kv_mode: KVMode) -> str | None:
    """Say that the KV cache of unfinished answers is recomputed although the recipe would keep it. None: it gets what
    it asks for. After an update a calibrated cache has other scales, and the trainer replays an answer with one set."""
    if cluster.weights_in_flight != "keep_cache" or kv_mode != "calibrated":
        return None
    return (
        "cluster.weights_in_flight: keep_cache cannot keep a calibrated KV cache: each update has other scales, and the"
        " trainer replays an answer with one set of them; the cache is recomputed, as with recompute_cache; to keep it,"
        " use fp8.kv_cache=int8, dynamic or none"
    )


def drafts_without_effect(recipe: Recipe) -> str | None:
    """The settings of drafts that a recipe without drafts does not read, in one line. None: there are none. They are no
    problem: a run that turns drafts off keeps its other settings and resumes."""
    changed = _changed_drafts(recipe)
    if recipe.engine.speculation.name != "none" or not changed:
        return None
    return f"{', '.join(changed)}: no effect while engine.speculation.name is none; set that to ngram, or remove them"


def without_effect(recipe: Recipe) -> str | None:
    """The recipe's settings of `engine` that a server does not read, in one line. None: there are none. They are no
    problem: a recipe that trains here is evaluated by a server as well."""
    if recipe.engine.backend != "openai":
        return None
    unread = [name for name in type(recipe.engine).model_fields if name not in {"backend", "openai", "speculation"}]
    given = [f"engine.{name}" for name in unread if name in recipe.engine.model_fields_set]
    given += _changed_drafts(recipe)
    return f"{', '.join(given)}: no effect with engine.backend: openai; the server has its own" if given else None


def _changed_drafts(recipe: Recipe) -> list[str]:
    """The settings of drafts that are not the defaults. `name`, which asks for drafts, is left out."""
    names = [f"engine.speculation.{name}" for name in SpeculationConfig.model_fields if name != "name"]
    return [name for name in names if is_set(recipe, name)]
