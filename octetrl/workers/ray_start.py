"""Watches `raylet` and `gcs_server` while `ray.init` starts them: nobody else does so far (ray_daemons.py comes after).

If one of them stops or dies at that time, `ray.init` fails half a minute later, or ends this process after a minute, or
never returns, depending on the moment. Here the rest of this Ray is killed instead, which makes `ray.init` raise where
it waits in Python. Where it does not, this process says what happened in one line and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from octetrl.workers.ray_daemons import LOOK_SECONDS, NAMES, children, state_of

START_SECONDS = 180.0  # of `ray.init`; it takes 4 to 20 s
RAISE_SECONDS = 35.0  # until `ray.init` has raised; it waits for its processes for 30 s


class StartGuard:
    """A context around `ray.init`. `why`: what went wrong, once something did."""

    def __init__(
        self, silent_seconds: float, processes: Callable[[], Sequence[int]], on_exit: Callable[[], None]
    ) -> None:
        """`silent_seconds`: for which a daemon may be stopped. `processes`: ids of all of this Ray. `on_exit`: called
        before this process is ended."""
        self._silent_seconds, self._processes, self._on_exit = silent_seconds, processes, on_exit
        self.why: str | None = None
        self._seen: dict[str, int] = {}
        self._stopped_since: dict[str, float] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="Ray's start", daemon=True)

    def __enter__(self) -> Self:
        self._stderr = os.dup(2)  # ray_cluster.py keeps what Ray prints meanwhile
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._thread.join()
        os.close(self._stderr)

    def _watch(self) -> None:
        began = time.monotonic()
        while self.why is None:
            if self._ends.wait(LOOK_SECONDS):
                return
            why = self._lost() or self._late(time.monotonic() - began)
            self.why = None if why is None else f"{why}; start the run again"
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not self._ends.wait(RAISE_SECONDS):
            self._on_exit()
            os.write(self._stderr, f"octetrl: Ray did not start: {self.why}\n".encode())
            os._exit(1)

    def _lost(self) -> str | None:
        """What happened to a daemon."""
        for pid, name in children():
            self._seen[name] = pid
        now = time.monotonic()
        for name, pid in self._seen.items():
            state = state_of(pid)
            if state in ("", "Z", "X"):
                return f"its process {name} died"
            if state != "T":
                self._stopped_since.pop(name, None)
            elif now - self._stopped_since.setdefault(name, now) > self._silent_seconds:
                return f"its process {name} was stopped for {now - self._stopped_since[name]:.0f} s"
        return None

    def _late(self, seconds: float) -> str | None:
        if seconds < START_SECONDS:
            return None
        absent = [name for name in reversed(NAMES) if name not in self._seen]
        what = f"its process {absent[0]}" if absent else f"an answer of {' and '.join(NAMES)}"
        return f"{what} was awaited for {seconds:.0f} s"
