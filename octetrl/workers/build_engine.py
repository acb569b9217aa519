"""Builds the rollout backend that a recipe asks for: this project's engine, or vLLM's (`engine.backend`)."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import torch

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.backends.vllm.names import model_config
from octetrl.backends.vllm.ranks import Ranks, together
from octetrl.backends.vllm.settings import cache_bytes_per_token, cache_tokens, check_room, engine_arguments
from octetrl.backends.vllm.start import start_vllm, write_model
from octetrl.config.backends import RESERVE, vllm_weight_bytes
from octetrl.config.memory import estimate_memory
from octetrl.config.schema import Recipe
from octetrl.config.worker_memory import on_each_worker, sent_bytes
from octetrl.data.tokenizer import Tokenizer
from octetrl.engine.engine import Engine
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.rollout.backend import RolloutBackend
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.tensor_peers import GridPeers

LATER = ("gradients", "optimizer")  # parts that a trainer may allocate with its first step


def build_engine(
    recipe: Recipe,
    model: Decoder,
    *,
    policy: PrecisionPolicy,
    tokenizer: Tokenizer,
    device: torch.device,
    trains: bool,
    peers: Peers = ALONE,
) -> RolloutBackend:
    """The backend of one worker. `model`: our engine's, filled by its worker. `trains`: a trainer shares the device.
    `peers`: the workers among which it generates."""
    if recipe.engine.backend == "openai":
        raise UserError("engine.backend: openai is for octetrl eval without a run or model; use octetrl or vllm here")
    if recipe.engine.backend == "vllm":
        return build_vllm(
            recipe,
            model.spec,
            policy=policy,
            tokenizer=tokenizer,
            device=device,
            trains=trains,
            rank=peers.worker.rank,
            ranks=peers.group if isinstance(peers, GridPeers) else None,
        )
    if recipe.engine.backend != "octetrl":
        raise AssertionError(f"engine.backend: {recipe.engine.backend} is not built here; add it to build_engine.py")
    return Engine(
        model,
        spec=model.spec,
        policy=policy,
        tokenizer=tokenizer,
        config=recipe.engine,
        context_length=recipe.model.context_length,
        dtype=model.dtype,
        device=device,
    )


def build_vllm(
    recipe: Recipe,
    spec: ModelSpec,
    *,
    policy: PrecisionPolicy,
    tokenizer: Tokenizer,
    device: torch.device,
    trains: bool,
    rank: int = 0,
    ranks: Ranks | None = None,
) -> VllmBackend:
    """vLLM beside a trainer, or beside the weights that other workers send. `spec`: of this worker's part of the model.
    `ranks`: the workers that have the others, and start one vLLM together.

    Raises UserError without a GPU, without vLLM, or without room for both.
    """
    if device.type != "cuda":
        raise UserError("engine.backend: vllm needs an NVIDIA GPU; use engine.backend: octetrl on a CPU")
    config, context = recipe.engine, recipe.model.context_length
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    taken = total - torch.cuda.mem_get_info(device)[0] + _allocated_later(recipe, spec, policy, trains)
    tokens = cache_tokens(config, taken, spec, policy, total)
    weights = vllm_weight_bytes(spec, policy.precisions().fp8_rollout)
    together(ranks, "load", lambda: check_room(tokens, context, taken + weights + RESERVE, total))
    if ranks is not None:
        tokens = fewest_tokens(ranks, tokens)
    with tempfile.TemporaryDirectory(prefix="octetrl-vllm-") as name:
        folder = write_model(model_config(spec.whole, policy), Path(name))
        pages = tokens // config.page_size + 1  # vLLM leaves one unused
        arguments = engine_arguments(
            config,
            policy,
            folder=str(folder),
            context_length=context,
            cache_bytes=pages * config.page_size * cache_bytes_per_token(spec, policy),
            ranks=spec.tensor.size,
        )
        vllm = start_vllm(arguments, rank, ranks)
    return VllmBackend(
        vllm,
        spec=spec,
        policy=policy,
        tokenizer=tokenizer,
        config=config,
        context_length=context,
        ranks=ranks,
    )


def fewest_tokens(ranks: Ranks, tokens: int) -> int:
    """The tokens of the smallest cache of any rank: their schedules are equal only with equal caches. Raises UserError
    if the ranks are on several machines."""
    hosts: list[str] = ranks.commands.gather_records(socket.gethostname(), "load")
    if len(set(hosts)) > 1:
        raise UserError(
            f"cluster.tensor_parallel: engine.backend: vllm keeps the workers that share a model on one machine, and"
            f" these are on {', '.join(dict.fromkeys(hosts))}; give cluster.nodes and gpus_per_node, a multiple of"
            f" {ranks.size}, or use engine.backend: octetrl"
        )
    return -int(ranks.commands.maximum(torch.tensor([-tokens]), "load"))


def with_own_engine(recipe: Recipe) -> Recipe:
    """For a worker that generates nothing: our engine holds the trainer's tensors, and another one needs its own."""
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "octetrl"})})


def _allocated_later(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, trains: bool) -> int:
    """Bytes that the worker will allocate and keep while rollouts are drawn: a trainer's, or for weights that are sent
    while it generates."""
    precisions, cluster = policy.precisions(), recipe.cluster
    if not trains:
        doubles = cluster.max_staleness > 0 and cluster.weight_buffer != "single"
        return sent_bytes(recipe, spec, precisions) if doubles else 0
    estimate = estimate_memory(recipe, spec, precisions, on_gpu=True, device_bytes=None)
    estimate = on_each_worker(recipe, estimate, None)
    kept = sum(part.num_bytes for part in estimate.parts if part.name in LATER)
    return kept + (0 if recipe.engine.release_for_training else estimate.bytes_when("training"))
