"""Watches `raylet` and `gcs_server`, the processes of a Ray that this run started on this machine.

Ray does not survive either of them. Without gcs_server its calls block for a minute, and then Ray ends this process;
without raylet it ends this process at the first record that needs shared memory. Both are children of this process, so
their end is known at once. The run then makes no further call and ends the rest of this Ray itself. If Ray is faster,
ray_watcher.py says what happened.

A daemon that is stopped (SIGSTOP) may block any call, and Ray ends this process if it dies during the call. So no call
begins while one is stopped. It is killed after `silent_seconds`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octetrl.workers.many.team import WorkerLost

NAMES = ("raylet", "gcs_server")
LOOK_SECONDS = 0.5


class RayLost(WorkerLost):
    """A process of Ray itself died, and all workers with it."""


@dataclass(slots=True)
class _Daemon:
    name: str
    pid: int
    handle: int  # a pidfd, readable after the process's end
    stopped_since: float | None = None


class Daemons:
    """The daemons that are children of this process now. `close` it."""

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._daemons = [_Daemon(name, pid, os.pidfd_open(pid)) for pid, name in children()]
        self._poll = select.poll()
        for daemon in self._daemons:
            self._poll.register(daemon.handle, select.POLLIN)
        self._killed: dict[str, float] = {}  # name -> seconds that it was stopped
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._kill_stopped, name="Ray's daemons", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RayLost if a daemon has ended."""
        with self._lock:
            ended = {handle for handle, _ in self._poll.poll(0)} if self._daemons else set()
            names = [daemon.name for daemon in self._daemons if daemon.handle in ended]
        for name in names:
            stopped = self._killed.get(name)
            what = "died" if stopped is None else f"was stopped for {stopped:.0f} s and then ended"
            raise RayLost(f"Ray's process {name} {what}, and all workers with it")

    def await_answer(self) -> None:
        """Wait while a daemon is stopped, or on its way from SIGKILL to its end. Raise RayLost if one has ended."""
        self.check()
        while self._is_stopped:
            time.sleep(LOOK_SECONDS)
            self.check()

    @property
    def answer(self) -> bool:
        """Whether no daemon has ended or is stopped now."""
        try:
            self.check()
        except RayLost:
            return False
        return not self._is_stopped

    @property
    def _is_stopped(self) -> bool:
        return any(daemon.name in self._killed or state_of(daemon.pid) == "T" for daemon in self._daemons)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        with self._lock:
            for daemon in self._daemons:
                self._poll.unregister(daemon.handle)
                os.close(daemon.handle)
            self._daemons = []

    def _kill_stopped(self) -> None:
        while not self._ends.wait(LOOK_SECONDS):
            now = time.monotonic()
            for daemon in self._daemons:
                if state_of(daemon.pid) != "T":
                    daemon.stopped_since = None
                elif daemon.stopped_since is None:
                    daemon.stopped_since = now
                elif now - daemon.stopped_since > self._silent_seconds:
                    self._killed[daemon.name] = now - daemon.stopped_since
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, and Ray has waited for it
                        signal.pidfd_send_signal(daemon.handle, signal.SIGKILL)


def state_of(pid: int) -> str:
    """The letter of /proc for a process's state; empty if it has ended."""
    try:
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def children() -> Iterator[tuple[int, str]]:
    """Ids and names of the daemons among this process's children. None where the system can't watch them."""
    if not hasattr(os, "pidfd_open"):
        return
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread or the child has ended
            for pid in task.joinpath("children").read_text().split():
                name = Path("/proc", pid, "comm").read_text(errors="replace").strip()
                if name in NAMES:
                    yield int(pid), name
