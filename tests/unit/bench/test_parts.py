"""A kernel's part: the innermost range of its launch, on its thread; else its name. Times and gaps add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function

from octetrl.bench.parts import (
    GAPS,
    PARTS,
    RANGES,
    Kernel,
    Launch,
    Range,
    Trace,
    busy_seconds,
    kernels_of_parts,
    part_by_name,
    part_rows,
    part_times,
    parts_of,
    read_trace,
)

MAIN, BACKWARD = 1, 2
GEMM = "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_TNT"


def event(cat: str, name: str, ts: float, dur: float, tid: int, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur, "args": args}


def chrome_events() -> list[dict[str, Any]]:
    """A forward on one thread and a backward on another, launched ahead of the GPU; kernels run long afterwards."""
    return [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
        event("user_annotation", "rows", 0, 100, MAIN),
        event("user_annotation", "gemm_forward", 10, 20, MAIN),  # within rows
        event("user_annotation", "ProfilerStep#1", 0, 1000, MAIN),  # no part
        event("cuda_runtime", "cudaLaunchKernelExC", 15, 2, MAIN, 1),
        event("cuda_driver", "cuLaunchKernelEx", 50, 2, MAIN, 2),
        event("user_annotation", "gemm_dgrad", 200, 20, BACKWARD),
        event("user_annotation", "gemm_wgrad", 230, 20, BACKWARD),
        event("cuda_runtime", "cudaLaunchKernelExC", 205, 2, BACKWARD, 3),
        event("cuda_runtime", "cudaLaunchKernelExC", 235, 2, BACKWARD, 4),
        event("cuda_runtime", "cudaLaunchKernel", 300, 2, BACKWARD, 5),  # in no range
        event("cuda_runtime", "cudaDeviceSynchronize", 400, 9, MAIN, 6),
        event("gpu_user_annotation", "gemm_dgrad", 500, 300, 7),  # the GPU's copy of a range is none
        event("kernel", GEMM, 500, 40, 7, 1),
        event("kernel", "_rms_norm_kernel", 540, 5, 7, 2),
        event("kernel", GEMM, 545, 50, 7, 3),
        event("kernel", GEMM, 595, 60, 7, 4),
        event(
            "kernel",
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            700,
            8,
            7,
            5,
        ),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 710, 2, 7),
    ]


def test_the_same_kernel_is_three_parts() -> None:
    trace = read_trace(chrome_events())
    assert parts_of(trace) == ["gemm_forward", "rows", "gemm_dgrad", "gemm_wgrad", "elementwise", "elementwise"]
    times = part_times(trace)
    assert {part: round(time.seconds * 1e6) for part, time in times.items()} == {
        "gemm_forward": 40,
        "gemm_dgrad": 50,
        "gemm_wgrad": 60,
        "rows": 5,
        "elementwise": 10,
    }
    assert list(times) == [part for part in PARTS if part in times], "in the order of the table"
    assert times["elementwise"].kernels == 2


def test_a_threads_own_range_comes_before_that_of_another() -> None:
    ranges = (Range("optimizer", MAIN, 0, 100), Range("gemm_dgrad", BACKWARD, 40, 60), Range("rows", MAIN, 45, 50))
    launches = {1: Launch(BACKWARD, 47), 2: Launch(BACKWARD, 70), 3: Launch(BACKWARD, 120), 4: Launch(3, 47)}
    kernels = tuple(Kernel(GEMM, correlation, 0, 1) for correlation in (1, 2, 3, 4, 99, None))
    assert parts_of(Trace(ranges, launches, kernels)) == ["gemm_dgrad", "optimizer", "gemm", "rows", "gemm", "gemm"]


def test_a_range_that_has_ended_claims_nothing() -> None:
    ranges = (Range("rows", MAIN, 0, 1000), Range("quantize", MAIN, 10, 20), Range("gemm_wgrad", MAIN, 30, 40))
    at = {1: 15.0, 2: 25.0, 3: 35.0, 4: 500.0, 5: 1001.0}
    launches = {correlation: Launch(MAIN, time) for correlation, time in at.items()}
    kernels = tuple(Kernel("_dq_kernel", correlation, 0, 1) for correlation in at)
    parts = parts_of(Trace(ranges, launches, kernels))
    assert parts == ["quantize", "rows", "gemm_wgrad", "rows", "attention_backward"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_adamw_kernel", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("_attention_rows_kernel", "attention_forward"),
        ("_dkdv_kernel", "attention_backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention_backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention_forward"),
        ("_silu_mul_backward_quantize_kernel", "rows"),
        ("_quantize_both_kernel", "quantize"),
        ("_quantize_weight_kernel", "requantize"),
        ("_chunk_statistics_kernel", "lm_head"),
        (GEMM, "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "gemm"),
        ("Memset (Device)", "elementwise"),
        ("something_new", "other"),
    ],
)
def test_without_a_range_the_name_decides(name: str, part: str) -> None:
    assert part_by_name(name) == part


def test_every_range_has_a_row() -> None:
    assert set(RANGES) < set(PARTS) and len(set(PARTS)) == len(PARTS)


def test_busy_is_the_time_with_any_kernel() -> None:
    kernels = [Kernel("a", None, 0, 10), Kernel("b", None, 5, 10), Kernel("c", None, 30, 10), Kernel("d", None, 32, 2)]
    assert busy_seconds(kernels) == pytest.approx(25e-6)
    assert busy_seconds([]) == 0


def test_rows_are_per_step_and_the_gaps_are_what_is_left() -> None:
    trace = read_trace(chrome_events())
    rows = part_rows(trace, steps=2, wall_seconds=100e-6)  # 165 us of kernels in two steps of 100 us
    assert {row["part"]: row["ms_per_step"] for row in rows} == pytest.approx(
        {
            "gemm_forward": 0.02,
            "gemm_dgrad": 0.025,
            "gemm_wgrad": 0.03,
            "rows": 0.0025,
            "elementwise": 0.005,
            GAPS: 0.0175,
        }
    )
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
    assert part_rows(trace, 2, 1e-6)[-1]["ms_per_step"] == 0, "a wall time below the kernels' leaves no gap"


def test_kernels_stand_by_their_parts() -> None:
    rows = kernels_of_parts(read_trace(chrome_events()), steps=2)
    assert [(row["part"], row["calls_per_step"]) for row in rows[:3]] == [
        ("gemm_wgrad", 0.5),
        ("gemm_dgrad", 0.5),
        ("gemm_forward", 0.5),
    ]
    assert sum(float(row["ms_per_step"]) for row in rows) == pytest.approx(0.0825)


class _Ranged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with record_function("gemm_forward"):
            return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        with record_function("gemm_dgrad"):
            return grads[0] * 2


def test_a_real_trace_has_the_ranges_of_forward_and_backward(tmp_path: Path) -> None:
    x = torch.ones(8, requires_grad=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler, record_function("rows"):
        _Ranged.apply(x).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = read_trace(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    by_name = {one.name: one for one in trace.ranges}
    assert set(by_name) == {"rows", "gemm_forward", "gemm_dgrad"}
    outer, inner = by_name["rows"], by_name["gemm_dgrad"]
    assert outer.start <= by_name["gemm_forward"].start < inner.start < inner.end <= outer.end
