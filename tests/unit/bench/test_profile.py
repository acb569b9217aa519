"""The window of a profile on a CPU: which steps are recorded, and what is said where there are too few.

Kernels are recorded on a GPU alone (tests/gpu/test_bench_profile.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from octetrl.bench.model import find_model
from octetrl.bench.profile import BETWEEN_KERNELS, STEPS, profile_rows
from octetrl.bench.rollout import Bench
from octetrl.bench.workload import Shape, Workload, fixed_lengths
from octetrl.cli.bench_options import with_layers


@dataclass(frozen=True)
class Event:
    key: str
    count: int
    self_device_time_total: float
    device_type: DeviceType = DeviceType.CUDA
    is_user_annotation: bool = False


class Recorder:
    """Stands in for torch's profiler: whenever it ran, it has seen the same."""

    running = 0

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None:
        Recorder.running += 1

    def stop(self) -> None:
        Recorder.running -= 1

    def key_averages(self) -> list[Event]:
        return [Event("_k_kernel", 2 * STEPS, 3.0 * STEPS), Event("aten::mm", 9, 9.0, DeviceType.CPU)]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "profile", Recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"):
        monkeypatch.setenv(name, "")


def of(answer: int, requests: int = 4, prompt: int = 5) -> Workload:
    return fixed_lengths(Shape(requests, prompt, answer), 2, 384, seed=0)


def bench(*workloads: Workload, **changes: Any) -> Bench:
    plan = Bench(with_layers(find_model("tiny"), 1), ("bf16",), workloads, torch.device("cpu"), warmup_tokens=0)
    return replace(plan, **changes)


def test_a_window_of_decode_steps_is_recorded_for_each_arm() -> None:
    said: list[str] = []
    rows = profile_rows(bench(of(2 * STEPS), precisions=("bf16", "fp8_full")), said.append)
    assert not said and Recorder.running == 0
    assert [row["precision"] for row in rows[::2]] == ["bf16", "fp8_full"]
    assert [row["kernel"] for row in rows] == ["_k_kernel", BETWEEN_KERNELS] * 2
    assert {(row["calls_per_step"], row["us_per_step"]) for row in rows[::2]} == {(2.0, 3.0)}
    for kernel, between in zip(rows[::2], rows[1::2], strict=True):
        assert float(kernel["share"]) + float(between["share"]) == pytest.approx(1)


def test_answers_too_short_for_the_window_are_said() -> None:
    said: list[str] = []
    rows = profile_rows(bench(of(1), of(2 * STEPS - 1), of(2 * STEPS)), said.append)
    assert {row["workload"] for row in rows} == {"4x5+60"}
    assert [line.split(" decode")[0] for line in said] == [
        "no profile of bf16, 4x5+1: 0",
        "no profile of bf16, 4x5+59: 29",
    ]
    assert all("30 are recorded; give longer answers" in line and "\n" not in line for line in said)
    assert Recorder.running == 0


def test_a_prefill_is_no_decode_step() -> None:
    """Two groups one after the other: the window opens with the first one's end, and the second is to be cached."""
    said: list[str] = []
    assert profile_rows(bench(of(25), max_batch=2), said.append) == []
    assert said[0].startswith("no profile of bf16, 4x5+25: 25 decode steps")
