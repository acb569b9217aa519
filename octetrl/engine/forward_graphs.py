"""One captured CUDA graph for each kind and size of forward, which is then one launch, whatever its number of kernels.

Batches are padded to one of a few sizes (`padded_batch`) with idle rows. A graph contains the addresses of the KV cache
with which it was captured. Freeing the cache for training therefore drops the graphs, and each size is captured again
when it first occurs. This costs one forward launched kernel by kernel, and its capture. `seconds` adds it up, and the
engine reports it.

All graphs share one memory pool, because they never run at the same time. The output of one is copied before the next
one runs.

Some CUDA calls cannot be recorded and would make a capture fail. Such calls of other threads (a reward's own model) are
allowed. Python's garbage collector is off during a capture: it may free the graphs of a deleted engine, which is such a
call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.engine.kv_cache import KVCache
from octetrl.models.decoder import Decoder

SMALL_SIZES = (1, 2, 4, 8)
STEP, LARGE_STEP, LARGE = 16, 32, 128
DRAFT_SIZES = (*SMALL_SIZES, 16, 32, 48, 64, 96, 128, 192)  # fewer: these graphs come on top of the others
LARGE_DRAFT_STEP = 128

Forward = Callable[[int, bool, bool, KVCache], Tensor]
"""A method: rows, whether some row draws, whether some row filters, and the cache."""


def padded_batch(num_sequences: int, max_batch: int) -> int:
    """1, 2, 4, 8, then in steps of 16, above 128 in steps of 32; `max_batch` at most."""
    if num_sequences <= SMALL_SIZES[-1]:
        size = next(size for size in SMALL_SIZES if size >= num_sequences)
    else:
        step = STEP if num_sequences <= LARGE else LARGE_STEP
        size = -(-num_sequences // step) * step
    return min(size, max_batch)


def padded_drafts(num_rows: int, max_batch: int) -> int:
    """The size of a forward with drafts: one of `DRAFT_SIZES`, above them in steps of 128; `max_batch` at most."""
    larger = -(-num_rows // LARGE_DRAFT_STEP) * LARGE_DRAFT_STEP
    return min(next((size for size in DRAFT_SIZES if size >= num_rows), larger), max_batch)


def can_capture(model: Decoder) -> bool:
    """Whether decode forwards of this model can be captured: it has fused forms, and it is whole, or the memory of GPUs
    carries its parts (layers/tensor_group.py)."""
    return model.has_fused_forms and (model.group.size == 1 or model.group.memory is not None)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Tensor


class ForwardGraphs:
    """Graphs of forwards, each captured when it is first run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0  # spent capturing, since the engine was built
        self._stream = torch.cuda.Stream()  # one for all captures: cuBLAS keeps a work space for every stream it met
        self._captured: dict[tuple[Forward, int, bool, bool], _Captured] = {}
        self._cache: KVCache | None = None
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, forward: Forward, size: int, draws: bool, filters: bool, cache: KVCache) -> Tensor:
        """Returns the result of `forward`. The next run overwrites it."""
        if cache is not self._cache:
            self.forget()
            self._cache = cache
        key = (forward, size, draws, filters)
        if key not in self._captured:
            # The first forward of a size runs kernel by kernel, which compiles and tunes the kernels. Only then is the
            # same work recorded.
            started = time.perf_counter()
            output = forward(size, draws, filters, cache)
            torch.cuda.synchronize()
            self._captured[key] = self._capture(key, cache)
            self.seconds += time.perf_counter() - started
            return output
        self._captured[key].graph.replay()
        return self._captured[key].output

    def forget(self) -> None:
        """Drops all graphs, and with them the memory they hold."""
        self._captured.clear()
        self._cache = None
        self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs can't be captured into again

    def _capture(self, key: tuple[Forward, int, bool, bool], cache: KVCache) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # Not torch.cuda.graph, which collects garbage and empties the allocator first.
        with _garbage_kept(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = key[0](*key[1:], cache)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Captured(graph, output)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
