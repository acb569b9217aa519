"""Times the phases of a step: every verb of a worker returns what its phases took, with its result.

    with clock("train") as took:
        ...
    took  ->  {"time/train": 12.3, "memory/peak_gb": 61.2}

A GPU works asynchronously, so its time would be counted in the next phase that waits for it. On a GPU the clock waits
for it when a phase begins and ends. That costs a few microseconds per phase of some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """`device`: whose work is timed, and whose memory is measured on a GPU. None: the host's time alone."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._peaks: list[int] = []  # bytes, of the blocks that are open; a block may lie in another

    @contextmanager
    def __call__(self, phase: str) -> Iterator[dict[str, float]]:
        """Yields a mapping that has `time/PHASE` in seconds after the block, also if it raises, and on a GPU
        `memory/peak_gb`: the most that was allocated at a time in it."""
        took: dict[str, float] = {}
        if self._device is not None:
            torch.cuda.synchronize(self._device)
            self._see_peak()
            self._peaks.append(0)
            torch.cuda.reset_peak_memory_stats(self._device)
        begin = time.perf_counter()
        try:
            yield took
        finally:
            if self._device is not None:
                torch.cuda.synchronize(self._device)
                self._see_peak()
                took["memory/peak_gb"] = self._peaks.pop() / 1e9
            took[f"time/{phase}"] = time.perf_counter() - begin

    def _see_peak(self) -> None:
        """The most since the last reset counts for every block that is open."""
        peak = torch.cuda.max_memory_allocated(self._device)
        self._peaks = [max(earlier, peak) for earlier in self._peaks]
