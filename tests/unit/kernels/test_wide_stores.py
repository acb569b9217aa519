"""A thread of the products of experts and of heads stores 16 bytes at a time: the compiler knows where a row begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
COMPILED = REPOSITORY / "build" / "triton"  # kept: its keys are of Triton's files and the kernel's text
KERNELS = {  # and their variants
    "_grouped_fp8_gemm_kernel": 4,
    "_grouped_bf16_gemm_kernel": 1,
    "_grouped_wgrad_gradient_kernel": 2,
    "_head_gemm_kernel": 5,
}


def test_products_store_16_bytes_a_thread() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(COMPILED), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-W", "error", "-m", "tests.unit.kernels.compile_stores"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    names = [name for name, _, _ in lines]
    assert {name: names.count(name) for name in names} == KERNELS
    assert all(int(scalar) == 0 and int(wide) > 0 for _, scalar, wide in lines), done.stdout
