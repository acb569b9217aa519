"""Compiles what is launched for a GPU that this machine need not have, instead of running it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from octetrl.kernels import gluon

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
UNITS = {  # by instruction, as PTX spells it
    "tcgen05.mma": r"\btcgen05\.mma\b(?!\S*block_scale)",
    "tcgen05.mma block_scale": r"\btcgen05\.mma\S*block_scale",
    "wgmma.mma_async": r"\bwgmma\.mma_async\b",
    "mma.sync": r"\bmma\.sync\b",
}
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes a program can have
MULTIPROCESSORS = 132


class Variant(NamedTuple):
    """A compiled kernel. stack, shared: bytes of a thread, of a program. `units`: how often which of UNITS multiply."""

    kernel: str
    registers: int
    stack: int
    shared: int
    instructions: int
    units: dict[str, int]

    def __str__(self) -> str:
        units = ", ".join(f"{count} {unit}" for unit, count in self.units.items()) or "no matrix unit"
        stack = f", {self.stack} B stack" if self.stack else ""
        return (
            f"{self.kernel}: {self.registers} registers{stack}, {self.shared:,} B shared memory,"
            f" {self.instructions:,} instructions, {units}"
        )


class OfflineDriver:
    """What Triton asks its driver for while it compiles for compute capability `target` / 10."""

    def __init__(self, target: int) -> None:
        self.target = target
        properties = {"max_shared_mem": SHARED_MEMORY[target], "multiprocessor_count": MULTIPROCESSORS}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


class Compiler:
    """Compiles launches for a target, and keeps what came out by the kernel's name and its hash."""

    def __init__(self, target: int, each: int) -> None:
        self.target, self.each = target, each
        self.compiled: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}

    def install(self) -> None:
        triton.runtime.driver.set_active(OfflineDriver(self.target))
        gluon.multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[assignment]
        torch.cuda.get_device_capability = lambda device=None: divmod(self.target, 10)  # type: ignore[assignment]
        launch = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            found = self.compiled.setdefault(kernel.__name__, {})
            if len(found) >= self.each:
                return None
            try:
                made = launch(kernel, *args, grid=grid, warmup=True, **options)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".strip()
                self.failed.setdefault(kernel.__name__, reason)
                raise
            found[made.hash] = made
            return made

        JITFunction.run = run


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def variant_of(name: str, made: Any) -> Variant:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        lines = _tool("cuobjdump", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    ptx = made.asm["ptx"]
    units = {unit: count for unit, pattern in UNITS.items() if (count := len(re.findall(pattern, ptx)))}
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,6}\*/", lines, re.MULTILINE))
    return Variant(name, int(found[1]), int(found[2]), made.metadata.shared, count, units)


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout
