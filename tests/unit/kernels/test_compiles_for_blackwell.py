"""The FP8 and MXFP8 products compile for Blackwell, where they have not run. `compile_kernels` takes all kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
COMPILED = REPOSITORY / "build" / "triton"  # kept: its keys are of Triton's files and the kernel's text
SOME = (
    "test_fp8_gemm.py::test_kernel_is_near_the_emulation[5-128-256-config0]",
    "test_mxfp8_gemm.py::test_scales_may_have_any_strides_and_y_another_type",
)


def test_kernels_compile_for_blackwell_and_gluon_is_not_chosen() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(COMPILED), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tests.unit.kernels.compile_kernels", "--target", "100", "--each", "1", *SOME]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if "_kernel: " in line)
    assert lines.keys() == {"_fp8_gemm_kernel", "_mxfp8_gemm_kernel"}  # none in Gluon
    assert "tcgen05.mma" in lines["_fp8_gemm_kernel"] and "block_scale" in lines["_mxfp8_gemm_kernel"]
