"""Builds the rollout backend that a recipe asks for: this project's engine, or vLLM's (`engine.backend`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.backends.vllm.names import model_config
from octetrl.backends.vllm.settings import cache_bytes_per_token, cache_tokens, check_room, engine_arguments
from octetrl.backends.vllm.start import start_vllm, write_model
from octetrl.config.errors import UserError
from octetrl.config.memory import estimate_memory
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec
from octetrl.config.vllm import RESERVE, vllm_weight_bytes
from octetrl.config.weight_buffer import sent_bytes
from octetrl.config.worker_memory import on_each_worker
from octetrl.data.tokenizer import Tokenizer
from octetrl.engine.engine import Engine
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.rollout.backend import RolloutBackend

LATER = ("gradients", "optimizer")  # parts that a trainer may allocate with its first step


def build_engine(
    recipe: Recipe,
    model: Decoder,
    *,
    policy: PrecisionPolicy,
    tokenizer: Tokenizer,
    device: torch.device,
    trains: bool,
    rank: int = 0,
) -> RolloutBackend:
    """The backend of one worker. `model`: our engine's, filled by its worker. `trains`: a trainer shares the device.
    `rank`: of the worker, among those that generate."""
    if recipe.engine.backend == "openai":
        raise UserError("engine.backend: openai is for octetrl eval without a run or model; use octetrl or vllm here")
    if recipe.engine.backend == "vllm":
        return build_vllm(
            recipe, model.spec, policy=policy, tokenizer=tokenizer, device=device, trains=trains, rank=rank
        )
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
) -> VllmBackend:
    """vLLM beside a trainer, or beside the weights that other workers send. Raises UserError without a GPU, without
    vLLM, or without room for both."""
    if device.type != "cuda":
        raise UserError("engine.backend: vllm needs an NVIDIA GPU; use engine.backend: octetrl on a CPU")
    config, context = recipe.engine, recipe.model.context_length
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    taken = total - torch.cuda.mem_get_info(device)[0] + _allocated_later(recipe, spec, policy, trains)
    tokens = cache_tokens(config, taken, spec, policy, total)
    weights = vllm_weight_bytes(spec, policy.precisions().fp8_rollout)
    check_room(tokens, context, taken + weights + RESERVE, total)
    with tempfile.TemporaryDirectory(prefix="octetrl-vllm-") as name:
        folder = write_model(model_config(spec, policy), Path(name))
        pages = tokens // config.page_size + 1  # vLLM leaves one unused
        arguments = engine_arguments(
            config,
            policy,
            folder=str(folder),
            context_length=context,
            cache_bytes=pages * config.page_size * cache_bytes_per_token(spec, policy),
        )
        vllm = start_vllm(arguments, rank)
    return VllmBackend(vllm, spec=spec, policy=policy, tokenizer=tokenizer, config=config, context_length=context)


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
