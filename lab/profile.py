"""Profiles a step of a bench's arm on a GPU: time by kernel, and of training by what its kernels are for.

    python -m lab.profile rollout|train|step [RECIPE] [section.key=value ...] [--workload 8x512+3584] [--steps 2]

The arm is that of `octetrl bench`. After its untimed steps and one that gives the wall time, `--steps` are recorded.

cuBLAS uses the same kernel names for forward, dgrad and wgrad, so names are not enough. The code that launches a kernel
opens a named range around it (octetrl/kernels/profiler_parts.py); a kernel belongs to the innermost range around its
launch, in the launching thread or else in any. A kernel outside all ranges is named by what its name contains. `gaps`
is the wall time without the profiler minus the time in which any kernel ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from lab.record import RESULTS, need_hopper, run_command, show, write_result
from octetrl.bench.arms import Arm, make_arm, with_layers
from octetrl.bench.run import bench_run
from octetrl.bench.workload import workload_of
from octetrl.config.load import load_recipe
from octetrl.kernels.profiler_parts import Part
from octetrl.run.loop import one_step

RANGES: tuple[str, ...] = get_args(Part)
SHOWN = 25  # kernels
BY_NAME = (  # the first that is found; for kernels outside all ranges
    ("optimizer", r"adamw"),
    ("lm_head", r"chunk_statistics|logits_gradient|sum_partials|logprob"),
    ("attention", r"flash|fmha|attention|_dq_kernel|_dkdv_kernel"),
    ("rows", r"rms_norm|silu_mul|rope|qkv_rotate|qkv_store|kv_replay"),
    ("quantize", r"quantize"),
    ("gemm", r"gemm|nvjet|cutlass|cublas|xmma|splitK"),
)
Event = Mapping[str, Any]
Row = dict[str, object]


def record(arm: Arm, steps: int) -> tuple[list[Event], float]:
    """The events of a Chrome trace of `steps` steps, and the seconds of a step without the profiler."""
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")  # with captured graphs the profiler would hang
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with bench_run(arm) as run, tempfile.TemporaryDirectory() as folder:
        for number in range(1, arm.untimed + 1):
            one_step(run, number)
        began = time.perf_counter()
        one_step(run, arm.untimed + 1)
        wall = time.perf_counter() - began
        with torch.profiler.profile(activities=activities) as profiler:
            for number in range(steps):
                one_step(run, arm.untimed + 2 + number)
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return [one for one in json.loads(path.read_text())["traceEvents"] if one.get("ph") == "X"], wall


def parts_of(events: Sequence[Event], kernels: Sequence[Event]) -> list[str]:
    """What each kernel is for."""
    ranges = [one for one in events if one.get("cat") == "user_annotation" and one["name"] in RANGES]
    ranges.sort(key=lambda one: float(one["ts"]))
    launches = {
        one["args"]["correlation"]: one
        for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in one.get("args", {})
    }
    found = []
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        around = (
            [] if launch is None else [one for one in ranges if one["ts"] <= launch["ts"] <= one["ts"] + one["dur"]]
        )
        own = [one for one in around if launch is not None and one["tid"] == launch["tid"]]
        by_name = next((part for part, pattern in BY_NAME if re.search(pattern, kernel["name"])), "other")
        found.append(str((own or around)[-1]["name"]) if around else by_name)
    return found


def busy_seconds(kernels: Sequence[Event]) -> float:
    """Time in which at least one kernel ran."""
    busy, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda one: float(one["ts"])):
        end = kernel["ts"] + kernel["dur"]
        busy, reached = busy + max(0.0, end - max(reached, kernel["ts"])), max(reached, end)
    return busy / 1e6


def rows_of(names: Sequence[str], kernels: Sequence[Event], what: Row, steps: int, wall: float) -> list[Row]:
    """A row for each name, the longest first."""
    micros, counts = Counter[str](), Counter(names)
    for name, kernel in zip(names, kernels, strict=True):
        micros[name] += kernel["dur"]
    return [
        what | {"name": name, "ms": us / steps / 1e3, "share": us / steps / 1e6 / wall, "calls": counts[name] / steps}
        for name, us in micros.most_common()
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["rollout", "train", "step"])
    parser.add_argument("recipe", nargs="?", default="bench_qwen3-8b")
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    parser.add_argument("--workload", default="8x512+3584")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_intermixed_args(words)
    need_hopper("profile")
    recipe = load_recipe(given.recipe, given.changes)
    spec = with_layers(recipe, None)
    workload = workload_of(recipe, given.workload, None, spec.max_positions)
    arm = make_arm(given.verb, tuple(given.changes), recipe, spec, workload, given.steps + 1)
    events, wall = record(arm, given.steps)
    kernels = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    what: Row = {"precision": str(recipe.precision), "workload": workload.name}
    parts = rows_of(parts_of(events, kernels), kernels, what, given.steps, wall)
    gaps = max(0.0, wall - busy_seconds(kernels) / given.steps)
    parts.append(what | {"name": "gaps", "ms": gaps * 1e3, "share": gaps / wall, "calls": 0.0})
    by_name = rows_of([one["name"][:80] for one in kernels], kernels, what, given.steps, wall)
    show(parts, f"{given.verb}, by part")
    show(by_name[:SHOWN], f"{given.verb}, by kernel")
    name = f"{recipe.model.preset or 'model'}_{given.verb}_{recipe.precision}"
    print(f"wrote {write_result('profile', name, parts, given.out, kernels=by_name)}")


if __name__ == "__main__":
    run_command("profile", main)
