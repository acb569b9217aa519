"""The device that `octetrl check` plans for: this machine's, or another one with a given amount of memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from octetrl.config.schema import Recipe

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    on_gpu: bool
    num_bytes: int | None  # None: not known
    is_here: bool = True  # false: planned for, a machine of which nothing else is known


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


def _first_gpu() -> Device | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    name, comma, mebibytes = answer.rpartition(", ")
    if not comma or not mebibytes.isdigit():
        return None
    return Device(f"{name}, {int(mebibytes) / 1024:.1f} GiB", True, int(mebibytes) * 2**20)
