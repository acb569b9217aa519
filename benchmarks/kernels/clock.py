"""The clock of the kernel benchmarks: microseconds of a call in a CUDA graph, so that launching costs nothing.

It is here and not in `octetrl/bench/` because Triton's timer needs Triton, which only `octetrl/kernels/` imports.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.testing import do_bench_cudagraph

REPEAT_MS = 50


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
