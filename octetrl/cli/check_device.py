"""The device that `octetrl check` plans for: this machine's, or another one with a given amount of memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from octetrl.config.backends import TRAITS
from octetrl.config.schema import Recipe

GIB = 2**30
HOPPER = "9.0"  # compute capability of the GPUs whose FP8 GEMMs are used


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    on_gpu: bool
    num_bytes: int | None  # None: not known
    is_here: bool = True  # false: planned for, a machine of which nothing else is known
    capability: str | None = None  # compute capability of a GPU, as 9.0; None: not known


def find_device(recipe: Recipe, memory_gib: float | None) -> Device:
    """The device the recipe would run on here, or the one it is planned for."""
    if memory_gib is not None:
        return Device(f"a GPU with {memory_gib:g} GiB", True, int(memory_gib * GIB), is_here=False)
    if recipe.cluster.device != "cpu" and not recipe.cluster.on_cpus:
        found = _first_gpu()
        if found is not None:
            return found
        if recipe.cluster.device == "cuda":
            return Device("cuda, but this machine has no GPU", True, None)
        if _needs_gpu(recipe):
            return Device("a GPU, and this machine has none; --memory-gib plans for one", True, None)
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(f"CPU with {num_bytes / GIB:.1f} GiB, FP8 is emulated", False, num_bytes)


def missing_gpu(recipe: Recipe, device: Device) -> list[str]:
    """The problem of a recipe that asks for a GPU where there is none."""
    if recipe.cluster.device != "cuda" or not device.is_here or device.num_bytes is not None:
        return []
    return [
        "cluster.device: cuda was asked for, but this machine has no GPU; plan for a machine that has one with"
        " --memory-gib 80, or set cpu, where FP8 is emulated"
    ]


def _needs_gpu(recipe: Recipe) -> bool:
    """Whether the recipe runs on no CPU, so this machine's memory says nothing about it."""
    return TRAITS[recipe.engine.backend].needs_gpu or (recipe.cluster.uses_ray and recipe.cluster.num_gpus > 0)


def missing_fp8(recipe: Recipe, device: Device) -> list[str]:
    """The problem of a recipe with FP8 on a GPU of this machine: linears for which it has no GEMMs, or a cache of vLLM
    whose attention may keep old scales."""
    cluster, fp8 = recipe.cluster, recipe.fp8
    elsewhere = cluster.uses_ray and not cluster.starts_ray
    if not (device.is_here and device.on_gpu) or elsewhere or device.capability in (None, HOPPER):
        return []
    of_vllm = recipe.engine.backend == "vllm"
    if not (fp8.rollout or fp8.train) or fp8.emulate is True:
        return [_no_cache_of_vllm(device)] if of_vllm and fp8.kv_cache == "calibrated" else []
    of_ours = not TRAITS[recipe.engine.backend].has_weights
    emulate = ", or fp8.emulate=true for its numbers without its speed" if of_ours else ""
    return [
        f"fp8: {device.name}, has no block-scaled FP8 GEMM (compute capability {device.capability}, and a Hopper GPU"
        f" has {HOPPER}); use precision=bf16{emulate}"
    ]


def _no_cache_of_vllm(device: Device) -> str:
    return (
        f"fp8.kv_cache: calibrated with engine.backend: vllm needs a Hopper GPU (compute capability {HOPPER}), and"
        f" {device.name}, has {device.capability}; elsewhere vLLM's attention may keep old scales; use none, or"
        " engine.backend: octetrl"
    )


def _first_gpu() -> Device | None:
    found = _asked("compute_cap,memory.total,name") or _asked("memory.total,name")  # older drivers lack the first
    if found is None or not found[-2].isdigit():
        return None
    mebibytes, capability = int(found[-2]), found[0] if len(found) > 2 else None
    return Device(f"{found[-1]}, {mebibytes / 1024:.1f} GiB", True, mebibytes * 2**20, capability=capability)


def _asked(fields: str) -> list[str] | None:
    """What nvidia-smi says about the first GPU. None: there is none, or no such field."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    values = answer.stdout.strip().split(", ", fields.count(","))
    return values if answer.returncode == 0 and len(values) == fields.count(",") + 1 else None
