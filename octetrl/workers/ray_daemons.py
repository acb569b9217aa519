"""Watches `raylet` and `gcs_server`, the processes of a Ray that this run started on this machine.

Ray does not survive either of them. Without gcs_server its calls block for a minute, and then Ray ends this process;
without raylet it ends this process at the first record that needs shared memory. Both are children of this process, so
their end is known at once. The run then makes no further call and ends the rest of this Ray itself. If Ray is faster,
ray_watcher.py says what happened.

A daemon that is stopped (SIGSTOP) may block any call, and Ray ends this process if it dies during the call. So no call
begins while one is stopped. It is killed after `silent_seconds`.

**StartGuard** watches both while `ray.init` starts them. If one of them stops or dies at that time, `ray.init` fails
half a minute later, or ends this process after a minute, or never returns, depending on the moment. Here the rest of
this Ray is killed instead, which makes `ray.init` raise where it waits in Python. Where it does not, this process says
what happened in one line and ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from octetrl.workers.team import WorkerLost

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
