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


SEVERAL = (  # fields of a cluster without a meaning for one worker
    *("gpus", "cpus", "trainer_gpus", "engine_gpus", "trainer_cpus", "engine_cpus"),
    *("nodes", "gpus_per_node", "cpus_per_node", "workers_per_gpu", "tensor_parallel", "context_parallel", "address"),
    *("max_staleness", "weights_in_flight", "weight_buffer"),
)


def one_worker(cluster: ClusterConfig) -> list[str]:
    """The overrides that leave one worker of these: they name the fields that are set."""
    fields = {name: ClusterConfig.model_fields[name].default for name in SEVERAL}
    changed = [
        f"cluster.{name}={'null' if alone is None else alone}"
        for name, alone in fields.items()
        if getattr(cluster, name) != alone
    ]
    return [*changed, "cluster.device=cpu"] if cluster.on_cpus and cluster.device != "cpu" else changed


def lacking_gpus(cluster: ClusterConfig, has: int, where: str, remedy: str) -> str:
    """Say that `where` has fewer GPUs than the workers need. `remedy`: what to do if fewer workers are not wanted."""
    wanted, workers = cluster.num_gpus, cluster.num_workers
    needs = f"{wanted} GPUs were asked for, {where} has {has}"
    if cluster.roles is not None:
        trainers, engines = cluster.roles
        given = f"cluster.trainer_gpus: {trainers} with engine_gpus: {engines}"
        fewer = f"use cluster.trainer_cpus={trainers} cluster.engine_cpus={engines} instead, remove them"
        return f"{given}: {needs}; {'lower them' if has > 1 else fewer}, or {remedy}"
    field = "gpus" if cluster.gpus is not None else "workers_per_gpu" if cluster.nodes is None else "nodes"
    fewer = "lower it" if has else f"use cluster.cpus={workers} instead, remove it"
    return f"cluster.{field}: {needs}; {fewer}, or {remedy}"


def local_lack(cluster: ClusterConfig, visible: int) -> str | None:
    """Say that this machine has too few GPUs for a Ray that the run starts here. None: it has enough."""
    if visible >= cluster.num_gpus:
        return None
    return lacking_gpus(cluster, visible, "this machine", "give the cluster.address of a Ray cluster that has them")


def whole_weights_problem(cluster: ClusterConfig, weight_codes: str, *, trains_fp8: bool) -> str | None:
    """Say that the setting needs whole BF16 weights, which none of several workers has. None: it does not."""
    if cluster.num_groups == 1 or weight_codes != "remade" or not trains_fp8:
        return None
    return (
        "trainer.weight_codes: remade quantises whole weights, and each of several workers has only some rows of them;"
        " use weight_codes: kept, or one worker"
    )
