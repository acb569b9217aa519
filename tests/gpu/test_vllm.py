"""vLLM as the backend of a short run: what it holds is ours to the byte, and its log-probs are near the trainer's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from octetrl.config.backends import why_no_vllm
from tests.house.tree import REPO
from tests.required import missing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_vllm() is not None, reason=str(why_no_vllm()))]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["bf16", "fp8_rollout", "fp8", "fp8_full"])
def test_a_short_run(precision: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.vllm_smoke", precision]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0 and f"{precision}: passed" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "precision"), [("both", "bf16"), ("roles", "bf16"), ("both", "fp8_full")])
def test_two_workers_on_one_gpu(kind: str, precision: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.vllm_two_workers", kind, precision]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0 and f"{kind}, {precision}: passed" in done.stdout, done.stdout + done.stderr[-4000:]


@pytest.mark.xdist_group("two GPUs")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_one_vllm_on_two_gpus(precision: str) -> None:
    if torch.cuda.device_count() < 2:
        missing("two-gpus", "fewer than two GPUs are visible")
    command = [sys.executable, "-m", "tests.gpu.vllm_tensor_parallel", precision]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and f"{precision}: passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_the_doctor_says_where_the_differences_begin(precision: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.vllm_doctor", precision, "--attribute"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=1780)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert "log-probs of 4,096 drawn tokens, engine against trainer" in lines, done.stdout
    steps = [line for line in lines if line.endswith(" of the recipe's mean")]
    assert len(steps) == (1 if precision == "bf16" else 3), done.stdout
