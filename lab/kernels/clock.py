"""The clock and the rows of the kernels' benchmarks. Times are of calls in a CUDA graph, so launching costs nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from triton.testing import do_bench_cudagraph

from octetrl.bench.rows import MEMORY_BYTES_PER_SECOND

REPEAT_MS = 50
REPLAYS, LAUNCHES = 7, 20  # timed replays of a graph, and how many calls it holds at least
ROTATED_BYTES = 220_000_000  # of inputs that take turns: more than L2 holds
Row = dict[str, object]
Call = Callable[[], object]


def median_us(*calls: Call) -> float:
    """Microseconds of one call. A replay of the graph makes each of `calls` once.

    Give calls with different inputs, more than the L2 cache holds together, to time reads from memory.
    """

    def all_calls() -> None:
        for call in calls:
            call()

    all_calls()
    torch.cuda.synchronize()  # the capture runs on a stream of its own, which would not wait for the inputs
    return 1e3 * float(do_bench_cudagraph(all_calls, rep=REPEAT_MS, return_mode="median")) / len(calls)


def quick_median_us(calls: Sequence[Call]) -> float:
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


def median_us_with_launches(call: Call, repeats: int = 7) -> float:
    """Microseconds of one call without a graph, with its launches: for long calls, and for those that allocate."""
    call()
    return _median_of_replays(call, repeats)


def _median_of_replays(call: Call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def memory_row(what: Row, moved: float, calls: Sequence[Call], instead: Sequence[Call] = (), name: str = "") -> Row:
    """The row of a kernel that memory bounds. moved: bytes that one call must read and write; floor_share: the time of
    these bytes at the memory's rate, as a share of the call's. instead: what the kernel replaces, timed as `name`."""
    us = median_us(*calls)
    row = what | {"us": us, "tb_per_s": moved / us / 1e6, "floor_share": moved * 1e6 / us / MEMORY_BYTES_PER_SECOND}
    return row | {name: median_us(*instead)} if instead else row
