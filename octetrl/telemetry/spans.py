"""Measure the wall-clock time of each phase of a step.

    with spans("rollout"):
        ...
    spans.take()  ->  {"time/rollout": 12.3}

If a phase runs twice in a step, its times are added. The time of a phase inside another counts in both. A GPU works
asynchronously, so its time would be counted in the next phase that waits for it. `synchronize`
(`torch.cuda.synchronize`) ends each span when its work ends. It costs a few microseconds per phase of some seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Spans:
    """The clock of a run. `synchronize` is called at the start and the end of each span; None on a CPU."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()  # phases of several threads may end at once

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as `time/<name>`, also if it raises."""
        begin = self._now()
        try:
            yield
        finally:
            seconds = self._now() - begin
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self, only: str = "", but: str = "") -> dict[str, float]:
        """Return the seconds of each phase since the last call, as `time/*`, and start again from zero.

        only, but: a phase that is taken alone, or left for a later call, because it belongs to another step."""
        with self._lock:
            taken = {name: s for name, s in self._seconds.items() if only in ("", name) and name != but}
            self._seconds = {name: s for name, s in self._seconds.items() if name not in taken}
        return {f"time/{name}": seconds for name, seconds in taken.items()}

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()
