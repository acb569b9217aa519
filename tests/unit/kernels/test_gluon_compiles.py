"""Gluon is experimental and changes with Triton's versions: every kernel compiles for Hopper with the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
COMPILED = REPOSITORY / "build" / "triton"  # kept: its keys are of Triton's files and the kernel's text


def test_every_gluon_kernel_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(COMPILED), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-W", "error", "-m", "tests.unit.kernels.compile_gluon"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    compiled = set(done.stdout.split())
    files = (REPOSITORY / "octetrl" / "kernels").rglob("*_gluon.py")
    kernels = {
        line.removeprefix("def ").partition("(")[0]
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def _") and "_gluon_kernel(" in line
    }
    assert len(kernels) == 8 and kernels == compiled
