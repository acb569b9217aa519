"""Some kernels of each kind compile for Blackwell, where none of them has run. `compile_kernels` takes all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SOME = ("test_quantize_weight.py::test_kernel_is_the_reference", "test_fp8_gemm.py::test_kernel_is_near_the_emulation")


def test_kernels_compile_for_blackwell_and_gluon_is_not_chosen(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tests.unit.kernels.compile_kernels", "--target", "100", "--each", "1", *SOME]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if "_kernel: " in line)
    assert {"_quantize_weight_kernel", "_fp8_gemm_kernel"} <= lines.keys()
    assert "tcgen05.mma" in lines["_fp8_gemm_kernel"] and not any("gluon" in name for name in lines)
