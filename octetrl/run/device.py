"""Which devices a run has, and the global switches that make a run repeatable."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from octetrl.config.schema import ClusterConfig
from octetrl.fp8.architectures import Capability
from octetrl.workers.build import resolve_device

NUMPY_SEEDS = 1 << 32  # numpy.random.seed refuses larger ones


def runs_on_gpu(cluster: ClusterConfig) -> bool:
    """Whether the run's models are on GPUs, of this process or of its workers."""
    return cluster.num_gpus > 0 if cluster.uses_ray else resolve_device(cluster).type == "cuda"


def gpu_capability() -> Capability | None:
    """Compute capability of this machine's first GPU, which stands for those of the workers. None: it has none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def gpus_beside(cluster: ClusterConfig) -> int:
    """Number of GPUs that this machine has, if the recipe does not say how many to use and a run would use one. Else
    0."""
    says = (cluster.gpus, cluster.nodes, cluster.cpus, cluster.address)
    if cluster.device == "cpu" or cluster.num_workers > 1 or any(one is not None for one in says):
        return 0
    return torch.cuda.device_count()


def seed_everything(seed: int) -> None:
    """Seed the generators that user code may touch; OctetRL itself uses only counters."""
    random.seed(seed)
    numpy.random.seed(seed % NUMPY_SEEDS)
    torch.manual_seed(seed)


def random_state() -> dict[str, object]:
    """State of every generator, as JSON."""
    algorithm, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, object] = {
        "python": [version, list(internal), gauss],
        "numpy": [algorithm, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_initialized():  # not in a driver whose workers have the GPUs
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((algorithm, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Around code that reads a user's objects and is no part of the run: they may draw when they are read."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
