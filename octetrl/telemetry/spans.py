"""How long each phase of a step took, by the wall clock.

    with spans("rollout"):
        ...
    spans.take()  ->  {"time/rollout": 12.3}

A phase entered twice in a step adds up; a phase inside another counts in both. Work on a GPU is queued and returns
early, so its time would be counted in the next phase that waits. Give `synchronize` (`torch.cuda.synchronize`) to end
each span when its work ends. That costs one wait per phase, a few microseconds against seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """The clock of a run. `synchronize` is called at both ends of each span; None on a CPU."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as `time/<name>`, also when it raises."""
        begin = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begin

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call, as `time/*`, and a clean slate."""
        taken = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()
