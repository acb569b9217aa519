"""Starts vLLM's engine in this process. Only this file imports vllm, when a recipe asks for it.

The engine's core runs in this process and not in one of its own. Weights are then copied from the trainer's tensors
into vLLM's in place, and read back from where its kernels read them: no handles of memory between processes, no second
copy in flight. vLLM's asynchronous front (`AsyncLLM`) needs a core in another process, so this is its synchronous
engine, whose `step` the session calls. The core still schedules a forward ahead of the one whose results it reads.

Each rank of a tensor-parallel vLLM starts in its worker's process too (vLLM's external launcher). vLLM uses
torch.distributed's default group if there is one, so they make it first.

vLLM sets global state when it starts: seeds of the random generators and the precision of float32 products. Both are
restored, because the trainer lives in the same process.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octetrl.backends.vllm.calls import LLMEngine, Started
from octetrl.backends.vllm.ranks import Ranks, together
from octetrl.backends.vllm.settings import no_room
from octetrl.config.backends import why_no_vllm
from octetrl.system.errors import UserError

FORCED = {
    "VLLM_USE_DEEP_GEMM_E8M0": "0",  # otherwise vLLM requantises weights to power-of-two scales on Hopper
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its core runs in this process
}
FORCED_ON_RANKS = {  # these need one process that sees all GPUs, or make the default group in another way
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": "0",
}
ENVIRONMENT = {  # unless the user set them
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # kernels are compiled when a shape first occurs
    "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
}


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """vLLM's engine, `SamplingParams` and prompts."""

    engine: LLMEngine
    make_sampling: Any
    make_prompt: Any

    def sampling(self, **settings: Any) -> Any:
        return self.make_sampling(**settings)

    def prompt(self, token_ids: list[int]) -> Any:
        return self.make_prompt(token_ids)


def prepare_environment(*, rank: int = 0) -> None:
    """Sets what vLLM reads from the environment. Before vLLM is imported.

    `rank`: of the worker. All but the first keep their compiled graphs in a folder of their own, because vLLM writes
    their list without a lock, in a folder that would be the same for all.
    """
    os.environ.update(FORCED)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if rank:
        caches = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        folder = os.environ.get("VLLM_CACHE_ROOT", os.path.join(caches, "vllm"))
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(folder, f"worker_{rank}")


def write_model(config: Mapping[str, Any], folder: Path) -> Path:
    """A model folder with nothing but its config.json: weights come from the trainer."""
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return folder


def _place_of(ranks: Ranks) -> dict[str, str]:
    """What vLLM's external launcher reads from the environment."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "LOCAL_RANK": str(device)}


def _refuse_without_vllm() -> None:
    why = why_no_vllm()
    if why is not None:
        raise UserError(why)


def start_vllm(settings: Mapping[str, Any], rank: int = 0, ranks: Ranks | None = None) -> Started:
    """An engine with these `EngineArgs`. `rank`: of several workers'. `ranks`: those that start one vLLM together.
    Raises UserError without vLLM, and for any error of its start."""
    together(ranks, "start", _refuse_without_vllm)
    prepare_environment(rank=rank)
    if ranks is not None:
        os.environ.update(FORCED_ON_RANKS | _place_of(ranks))
        ranks.join_default_group()
    with _global_state_kept():
        try:
            from vllm import EngineArgs, SamplingParams
            from vllm.inputs.engine import tokens_input
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine.llm_engine import LLMEngine as EngineOfVllm

            engine = EngineOfVllm.from_engine_args(EngineArgs(**settings), enable_multiprocessing=False)
        except (ValueError, NotImplementedError, AssertionError, RuntimeError, ImportError, OSError) as error:
            raise _of_start(error) from error
    how = {"output_kind": RequestOutputKind.DELTA, "detokenize": False, "flat_logprobs": True}
    return StartedVllm(engine, partial(SamplingParams, **how), tokens_input)


def _of_start(error: Exception) -> UserError:
    """The line of an error that ended vLLM's start. vLLM may wrap one about memory in another."""
    if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError):
        return no_room("weights, graphs and cache", error)
    said = " ".join(str(error).split())[:300]
    if isinstance(error, ValueError | NotImplementedError):
        return UserError(f"engine.backend: vLLM refuses this model or its settings: {said}")
    return UserError(
        f"engine.backend: vLLM did not start ({type(error).__name__}: {said}); its lines above may say more;"
        " correct that, or use engine.backend: octetrl"
    )


@contextmanager
def _global_state_kept() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    precision = torch.get_float32_matmul_precision()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_float32_matmul_precision(precision)
