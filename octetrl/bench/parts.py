"""Assigns each kernel of a profiler's trace to a part of the training step, and adds up seconds by part.

cuBLAS uses the same kernel names for forward, dgrad and wgrad, so names are not enough. The code that launches a kernel
opens a named range around it (kernels/parts.py). The trace links the two:

    kernel  --correlation-->  launch (thread, time)  --lies in-->  the innermost known range of that thread

Autograd runs the backward in its own thread, with its own ranges. If a launch lies in no range of its thread, the
ranges of the other threads count: only one thread works at a time here. A kernel outside all ranges is assigned by its
name: `gemm` and `elementwise` are kernels of unknown purpose. `gradients` are the float32 sums of gradients over
micro-batches. A forward that is recomputed in the backward (activation checkpointing) counts as forward.

The time of a part is the sum of its kernels. `gaps` is the wall time, measured without the profiler, minus the time in
which any kernel ran. Overlapping streams are therefore not counted twice there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from octetrl.bench.profile import short_name
from octetrl.bench.turns import Row
from octetrl.kernels.parts import Part

GAPS, OTHER, UNKNOWN_GEMM, ELEMENTWISE = "gaps", "other", "gemm", "elementwise"
RANGES: tuple[str, ...] = get_args(Part)
PARTS = (*RANGES[:3], UNKNOWN_GEMM, *RANGES[3:7], ELEMENTWISE, *RANGES[7:], OTHER, GAPS)  # in the order of the table
_BY_NAME = (  # the first that is found; for kernels outside all ranges
    ("optimizer", r"adamw|multi_tensor_apply|FusedAdam"),
    ("lm_head", r"chunk_statistics|logits_gradient|sum_partials|log_?softmax|logprob"),
    ("attention_backward", r"_dq_kernel|_dkdv_kernel|(flash|fmha|attention|sdpa).*(bwd|backward|bprop)"),
    ("attention_forward", r"flash|fmha|attention|sdpa"),
    ("rows", r"rms_norm|silu_mul|rope|qkv_rotate|kv_replay|row_statistics"),
    ("requantize", r"quantize_weight"),
    ("quantize", r"quantize"),
    (UNKNOWN_GEMM, r"gemm|nvjet|cutlass|cublas|xmma|splitK"),
    (ELEMENTWISE, r"elementwise|reduce|gather|index|scatter|[Cc]opy|Memcpy|Memset|[Ff]ill|Cat"),
)
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Range:
    """One `record_function` block."""

    name: str
    thread: object
    start: float  # microseconds, as all times of a trace
    end: float


@dataclass(frozen=True, slots=True)
class Launch:
    thread: object
    at: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work of the GPU: a kernel, a copy or a fill."""

    name: str
    correlation: int | None
    start: float
    duration: float


@dataclass(frozen=True, slots=True)
class Trace:
    ranges: tuple[Range, ...]
    launches: Mapping[int, Launch]  # by correlation
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class PartTime:
    seconds: float
    kernels: int


def read_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Read the `traceEvents` of a profiler's Chrome trace. Ranges with other names are left out."""
    ranges, launches, kernels = [], {}, []
    for event in events:
        kind = event.get("cat")
        if event.get("ph") != "X" or kind is None:
            continue
        start, duration, name = float(event["ts"]), float(event.get("dur", 0.0)), str(event["name"])
        correlation = event.get("args", {}).get("correlation")
        if kind == "user_annotation" and name in RANGES:
            ranges.append(Range(name, event["tid"], start, start + duration))
        elif kind in _LAUNCHES and correlation is not None:
            launches[int(correlation)] = Launch(event["tid"], start)
        elif kind in _KERNELS:
            kernels.append(Kernel(name, None if correlation is None else int(correlation), start, duration))
    return Trace(tuple(ranges), launches, tuple(kernels))


def part_times(trace: Trace) -> dict[str, PartTime]:
    """Time and number of kernels of each part that has any."""
    micros: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for kernel, part in zip(trace.kernels, parts_of(trace), strict=True):
        micros[part] += kernel.duration
        counts[part] += 1
    return {part: PartTime(micros[part] / 1e6, counts[part]) for part in PARTS if part in counts}


def parts_of(trace: Trace) -> list[str]:
    """The part of every kernel of the trace."""
    by_thread: dict[object, list[Range]] = defaultdict(list)
    for one in trace.ranges:
        by_thread[one.thread].append(one)
    threads = {thread: _Nest(ranges) for thread, ranges in by_thread.items()}
    anywhere, nowhere = _Nest(trace.ranges), _Nest(())
    parts = []
    for kernel in trace.kernels:
        part = None
        launch = None if kernel.correlation is None else trace.launches.get(kernel.correlation)
        if launch is not None:
            own = threads.get(launch.thread, nowhere)
            part = own.innermost(launch.at) or anywhere.innermost(launch.at)
        parts.append(part or part_by_name(kernel.name))
    return parts


def part_by_name(name: str) -> str:
    """The part of a kernel that lies in no range."""
    return next((part for part, pattern in _BY_NAME if re.search(pattern, name)), OTHER)


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one kernel ran."""
    busy, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.duration
        busy += max(0.0, end - max(reached, kernel.start))
        reached = max(reached, end)
    return busy / 1e6


class _Nest:
    """Ranges in the order of their start. A point's innermost range is the last started one that has not ended."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self._ranges = sorted(ranges, key=lambda one: (one.start, -one.end))
        self._starts = [one.start for one in self._ranges]
        self._reach: list[float] = []  # the latest end of all ranges up to here: where to stop looking back
        for one in self._ranges:
            self._reach.append(max(one.end, self._reach[-1] if self._reach else one.end))

    def innermost(self, at: float) -> str | None:
        for index in range(bisect_right(self._starts, at) - 1, -1, -1):
            if self._ranges[index].end >= at:
                return self._ranges[index].name
            if self._reach[index] < at:
                return None
        return None


def part_rows(trace: Trace, steps: int, wall_seconds: float) -> list[Row]:
    """A row for each part and one for the gaps, per step, in the order of `PARTS`. wall_seconds: of an unprofiled
    step."""
    times = part_times(trace)
    rows: list[Row] = [
        {
            "part": part,
            "ms_per_step": time.seconds / steps * 1e3,
            "share": time.seconds / steps / wall_seconds,
            "kernels_per_step": time.kernels / steps,
        }
        for part, time in times.items()
    ]
    gaps = max(0.0, wall_seconds - busy_seconds(trace.kernels) / steps)
    rows.append({"part": GAPS, "ms_per_step": gaps * 1e3, "share": gaps / wall_seconds, "kernels_per_step": 0.0})
    return rows


def kernels_of_parts(trace: Trace, steps: int) -> list[Row]:
    """A row for each kernel of each part, the longest first: what explains the table."""
    micros: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for kernel, part in zip(trace.kernels, parts_of(trace), strict=True):
        micros[part, short_name(kernel.name)] += kernel.duration
        counts[part, short_name(kernel.name)] += 1
    return [
        {
            "part": part,
            "kernel": name,
            "calls_per_step": counts[part, name] / steps,
            "ms_per_step": micros[part, name] / steps / 1e3,
        }
        for part, name in sorted(micros, key=micros.__getitem__, reverse=True)
    ]
