"""The clock of the kernel benchmarks: microseconds of a call in a CUDA graph, so that launching costs nothing.

It is here and not in `octetrl/bench/` because Triton's timer needs Triton, which only `octetrl/kernels/` imports.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from triton.testing import do_bench_cudagraph

REPEAT_MS = 50
REPLAYS, LAUNCHES = 7, 20  # timed replays of a graph, and how many calls it holds at least


def median_us(*calls: Callable[[], object]) -> float:
    """Microseconds of one call. A replay of the graph makes each of `calls` once.

    Give calls with different inputs, more than the L2 cache holds together, to time reads from memory.
    """

    def all_calls() -> None:
        for call in calls:
            call()

    all_calls()
    torch.cuda.synchronize()  # the capture runs on a stream of its own, which would not wait for the inputs
    return 1e3 * float(do_bench_cudagraph(all_calls, rep=REPEAT_MS, return_mode="median")) / len(calls)


def quick_median_us(calls: Sequence[Callable[[], object]]) -> float:
    """`median_us` with a fixed, small number of calls, for choosing among thousands of kernels."""
    calls = list(calls) * -(-LAUNCHES // len(calls))
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return _median_of_replays(graph.replay, REPLAYS) / len(calls)


def median_us_with_launches(call: Callable[[], object], repeats: int = 7) -> float:
    """Microseconds of one call without a graph, with its launches: for long calls, and for those that allocate."""
    call()
    return _median_of_replays(call, repeats)


def _median_of_replays(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)
