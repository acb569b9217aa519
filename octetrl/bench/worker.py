"""Builds the worker that a bench measures: as a run does, with the weights of a preset created on the device."""

from __future__ import annotations

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.model import BenchModel, fill_weights, tokenizer_of
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.build import BuiltWorker, Role, keep_codes
from octetrl.workers.worker import Worker


def bench_worker(
    model: BenchModel,
    recipe: Recipe,
    device: torch.device,
    *,
    trains: bool = True,
    draws: bool = True,
    peers: Peers = ALONE,
    loaders: Peers | None = None,
) -> Worker:
    """A worker of `model`, or of its part of it. Workers with the same seed on the same kind of device have the same
    weights. `draws` false: others generate."""

    return Worker(
        recipe,
        spec=model.spec.cut(TensorCut(peers.group.rank, peers.group.size)),
        policy=precision_policy(model.spec, recipe.fp8),
        tokenizer=tokenizer_of(model),
        algorithm=build_algorithm(recipe.algorithm),
        load_weights=lambda decoder, loading: fill_weights(decoder, model, recipe.seed, loading),
        device=device,
        trains=trains,
        draws=draws,
        peers=peers,
        loaders=loaders,
    )


def hosted_bench_worker(
    model: BenchModel,
    recipe: Recipe,
    device: torch.device,
    *,
    trains: bool,
    peers: Peers,
    loaders: Peers,
    role: Role,
) -> BuiltWorker:
    """The same in a process of its own, for `WorkerPlan.build`."""
    does = {"trains": trains and role != "generates", "draws": role != "trains"}
    worker = bench_worker(model, recipe, device, peers=peers, loaders=loaders, **does)
    if role == "generates":
        keep_codes(worker)
    return BuiltWorker(worker, loaded=worker.loaded)
