"""Measures where the time of a decode step goes: the kernels of `STEPS` steps in the middle of a workload's answers.

The workload runs until half of its tokens are generated, so batch and context are typical. Then torch's profiler
records the GPU for some steps, and the rest of the workload is skipped. Profiling slows the GPU a little, so it runs
after all timing. The time of a step in which no kernel ran is a row of its own.

A step is counted when its results are read. As many steps are in flight at the start of the recording as at its end, so
as many are recorded as counted, except for the last two of a workload. If the answers end before all steps were
recorded, there are no rows.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from torch.autograd import DeviceType

from octetrl.bench.model import give_memory_back
from octetrl.bench.rollout import Bench, build_arm, warm_up
from octetrl.bench.turns import Row
from octetrl.bench.workload import Workload
from octetrl.engine.engine import Engine
from octetrl.records import GenerationProgress

STEPS = 30
BETWEEN_KERNELS = "(between kernels)"
NAME_LENGTH = 72


class _EnoughSeen(Exception):
    """Ends `generate` early: enough steps were recorded."""


class _Window:
    """Follows a generation and records `STEPS` decode steps from its middle on."""

    def __init__(self, half: int) -> None:
        self.profiler: Any = None
        self.steps, self.seconds = 0, 0.0
        self._half, self._tokens, self._began = half, 0, 0.0

    def __call__(self, progress: GenerationProgress) -> None:
        if self.profiler is None:
            if progress.generated_tokens >= self._half:
                torch.cuda.synchronize()
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()
                self._tokens, self._began = progress.generated_tokens, time.perf_counter()
            return
        self.steps += progress.generated_tokens > self._tokens  # or it was prefill
        self._tokens = progress.generated_tokens
        if self.is_whole:
            raise _EnoughSeen

    @property
    def is_whole(self) -> bool:
        return self.steps == STEPS

    def close(self) -> None:
        """Once, whether all steps were seen or the answers ended before."""
        if self.profiler is not None:
            torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self._began
            self.profiler.stop()


def profile_rows(bench: Bench, say: Callable[[str], None]) -> list[Row]:
    """Builds each precision's engine once more and profiles it on each workload. Needs a GPU. `say` receives a line
    about answers
    that are too short."""
    # CUDA graphs and a profiler that comes and goes: without these, older CUPTI crashes on the next graph.
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    rows: list[Row] = []
    for workload, precision in product(bench.workloads, bench.precisions):
        arm = build_arm(bench, precision, workload)
        warm_up(arm, workload, bench.warmup_tokens)
        window = _record(arm.engine, workload)
        arm.engine.sleep()
        del arm
        give_memory_back(bench.device)
        if window.is_whole:
            head: Row = {"precision": precision, "workload": workload.name}
            rows += [head | row for row in kernel_rows(_kernels(window.profiler), window.steps, window.seconds)]
        else:
            say(
                f"no profile of {precision}, {workload.name}: {window.steps} decode steps came after the"
                f" middle of its answers and {STEPS} are recorded; give longer answers"
            )
    return rows


def _record(engine: Engine, workload: Workload) -> _Window:
    window = _Window(workload.generated_tokens // 2)
    try:
        engine.generate(workload.requests, window)
    except _EnoughSeen:
        pass
    finally:
        window.close()
    return window


def _kernels(profiler: Any) -> list[tuple[str, int, float]]:
    """(name, calls, microseconds) of each kernel."""
    return [
        (event.key, event.count, event.self_device_time_total)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def kernel_rows(kernels: Iterable[tuple[str, int, float]], steps: float, seconds: float) -> list[Row]:
    """A row for each kernel, the longest first, and one for the time without kernels. Shares are of the step's wall
    time."""
    calls: dict[str, int] = defaultdict(int)
    micros: dict[str, float] = defaultdict(float)
    for name, count, spent in kernels:
        calls[short_name(name)] += count
        micros[short_name(name)] += spent
    wall = seconds * 1e6
    rows: list[Row] = [
        {
            "kernel": name,
            "calls_per_step": calls[name] / steps,
            "us_per_step": micros[name] / steps,
            "share": micros[name] / wall,
        }
        for name in sorted(micros, key=micros.__getitem__, reverse=True)
    ]
    idle = max(0.0, wall - sum(micros.values()))
    last: Row = {"kernel": BETWEEN_KERNELS, "calls_per_step": 0.0, "us_per_step": idle / steps, "share": idle / wall}
    return [*rows, last]


def short_name(name: str) -> str:
    """A kernel's name without return type, arguments, namespaces and template parameters, except an elementwise
    op's."""
    bare = name.removeprefix("void ")
    head = re.split(r"[<(]", bare.replace("(anonymous namespace)::", ""), maxsplit=1)[0].rsplit("::", 1)[-1].strip()
    does = re.search(r"(\w+?)(?:_?[Ff]unctor|Op)\b|(\w+)_kernel_cuda|(\w+)_kernel_impl", bare[len(head) :])
    detail = next((part for part in does.groups() if part), "") if does else ""
    return (f"{head}<{detail}>" if detail else head or name)[:NAME_LENGTH]
