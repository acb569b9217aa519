"""vLLM's settings from a recipe, and the size of its KV cache.

vLLM has weights of its own beside the trainer's, in memory of its own. While a trainer trains, both its weights and its
cache are freed (its sleep of level 2). So the cache gets a share of what these leave while rollouts are drawn:

    device - what the trainer always has (config/memory.py) - vLLM's weights - RESERVE
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octetrl.config.backends import RESERVE, vllm_weight_bytes
from octetrl.config.schema import EngineConfig
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.shapes.spec import PREFILL_CHUNK, ModelSpec
from octetrl.system.errors import UserError

GIB = 2**30
ON_RANKS: Mapping[str, Any] = {  # of a tensor-parallel vLLM
    "distributed_executor_backend": "external_launcher",
    # NCCL adds the parts: what follows needs one process that sees all GPUs, and a worker sees its own alone
    "disable_custom_all_reduce": True,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False, "enable_sp": False, "fuse_gemm_comms": False}},
}


def cache_bytes_per_token(spec: ModelSpec, policy: PrecisionPolicy) -> int:
    """Bytes of a token in vLLM's cache: one scale serves a whole layer."""
    value = 2 if policy.kv_mode == "none" else 1
    return sum(value * tensor.num_values for layer in range(spec.num_layers) for tensor in spec.cached(layer))


def cache_tokens(config: EngineConfig, taken: int, spec: ModelSpec, policy: PrecisionPolicy, device_bytes: int) -> int:
    """Tokens of vLLM's cache; 0 or less if there is no room. `taken`: bytes of the trainer and of all others."""
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens // config.page_size * config.page_size
    free = device_bytes - taken - vllm_weight_bytes(spec, policy.precisions().fp8_rollout) - RESERVE
    tokens = int(free * config.kv_memory_fraction) // cache_bytes_per_token(spec, policy)
    return tokens // config.page_size * config.page_size


def check_room(tokens: int, context_length: int, needed: int, device_bytes: int) -> None:
    """Raises UserError if the cache has no room for one context beside the trainer. `needed`: bytes of all else."""
    if tokens < context_length:
        raise UserError(
            f"engine.backend: vllm has weights of its own beside the trainer's: {needed / GIB:.1f} GiB of"
            f" {device_bytes / GIB:.1f} leave room for {max(0, tokens):,} tokens of its KV cache, less than"
            f" model.context_length {context_length:,}; use trainer.optimizer.offload=true, a smaller model, or"
            " engine.backend: octetrl, which shares the trainer's weights"
        )


def no_room(what: str, error: Exception) -> UserError:
    """The line for memory of vLLM that the device did not give."""
    said = " ".join(str(error).split())
    return UserError(
        f"engine.backend: vLLM's {what} do not fit beside the trainer ({said}); lower engine.kv_memory_fraction or"
        " engine.kv_cache_tokens, or use trainer.optimizer.offload=true"
    )


def engine_arguments(
    config: EngineConfig,
    policy: PrecisionPolicy,
    *,
    folder: str,
    context_length: int,
    cache_bytes: int,
    ranks: int = 1,
) -> Mapping[str, Any]:
    """`EngineArgs` of vLLM, with its compiler and its graphs. context_length in tokens, cache_bytes of all pages of one
    rank."""
    return ({} if ranks == 1 else {"tensor_parallel_size": ranks, **ON_RANKS}) | {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": "bfloat16",
        "max_model_len": context_length,
        "max_num_seqs": config.max_batch,
        "max_num_batched_tokens": max(config.prefill_chunk or PREFILL_CHUNK, config.max_batch),
        "block_size": config.page_size,
        "enable_prefix_caching": config.prefix_cache != "off",
        "kv_cache_dtype": {"none": "auto", "calibrated": "fp8_e4m3"}[policy.kv_mode],  # no scales of tokens
        "kv_cache_memory_bytes": cache_bytes,
        "gpu_memory_utilization": 0.01,  # `kv_cache_memory_bytes` decides; vLLM only checks that this much is free
        "logprobs_mode": "processed_logprobs",  # after the temperature; its raw ones ignore it
        "enable_sleep_mode": True,
        "disable_log_stats": True,
        "enforce_eager": False,
        "seed": 0,  # each request has its own
    }
