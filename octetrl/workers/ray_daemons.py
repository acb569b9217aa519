"""Watches `raylet` and `gcs_server`, the processes of a Ray that this run started on this machine.

Ray does not survive either of them. Without gcs_server its calls block for a minute, and then Ray ends this process;
without raylet it ends this process at the first record that needs shared memory. Both are children of this process, so
their end is known at once. The run then makes no further call and ends the rest of this Ray itself. If Ray is faster,
ray_watcher.py says what happened.

A daemon that is stopped (SIGSTOP) may block any call, and Ray ends this process if it dies during the call. So no call
begins while one is stopped. It is killed after `silent_seconds`.

**Starting.** If one of them stops or dies while `ray.init` starts them, `ray.init` fails half a minute later, or ends
this process after a minute, or never returns, depending on the moment. Here the rest of this Ray is killed instead,
which makes `ray.init` raise where it waits in Python. Where it does not, this process says what happened in one line
and ends.
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

from octetrl.workers.team import WorkerLost

NAMES = ("raylet", "gcs_server")
LOOK_SECONDS = 0.5
START_SECONDS = 180.0  # of `ray.init`; it takes 4 to 20 s
RAISE_SECONDS = 35.0  # until `ray.init` has raised; it waits for its processes for 30 s


class RayLost(WorkerLost):
    """A process of Ray itself died, and all workers with it."""


@dataclass(slots=True)
class _Daemon:
    name: str
    pid: int
    handle: int  # a pidfd, readable after the process's end
    stopped_since: float | None = None


class Daemons:
    """The daemons that are children of this process. `starting` finds them; `close` ends the watch."""

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self.why_not_started: str | None = None
        self._daemons: list[_Daemon] = []
        self._poll = select.poll()
        self._killed: dict[str, float] = {}  # name -> seconds that it was stopped
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def starting(self, processes: Callable[[], Sequence[int]], on_exit: Callable[[], None]) -> Iterator[None]:
        """A context around `ray.init`. `processes`: ids of all of this Ray. `on_exit`: called before this process is
        ended. Sets `why_not_started` once something went wrong."""
        stderr = os.dup(2)  # ray_cluster.py keeps what Ray prints meanwhile
        has_started = threading.Event()

        def give_up(why: str) -> None:
            self.why_not_started = f"{why}; start the run again"
            for process in processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not has_started.wait(RAISE_SECONDS):
                on_exit()
                os.write(stderr, f"octetrl: Ray did not start: {self.why_not_started}\n".encode())
                os._exit(1)

        def guard() -> None:
            began = time.monotonic()
            while not has_started.wait(LOOK_SECONDS):
                self._find()
                seconds = time.monotonic() - began
                lost = next((f"its process {name} {what}" for name, what in self._ended()), None)
                if lost is not None or seconds > START_SECONDS:
                    return give_up(lost or f"{self._awaited()} was awaited for {seconds:.0f} s")

        self._begin(guard)
        self._begin(self._kill_stopped)
        try:
            yield
        finally:
            has_started.set()
            self._threads[0].join()
            os.close(stderr)
            self._find()

    def check(self) -> None:
        """Raise RayLost if a daemon has ended."""
        for name, what in self._ended():
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
        return not self._ended() and not self._is_stopped

    @property
    def _is_stopped(self) -> bool:
        return any(daemon.name in self._killed or state_of(daemon.pid) == "T" for daemon in self._daemons)

    def close(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        with self._lock:
            for daemon in self._daemons:
                self._poll.unregister(daemon.handle)
                os.close(daemon.handle)
            self._daemons = []

    def _begin(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, name="Ray's daemons", daemon=True))
        self._threads[-1].start()

    def _find(self) -> None:
        with self._lock:
            known = {daemon.pid for daemon in self._daemons}
            for pid, name in children():
                if pid not in known:
                    with contextlib.suppress(ProcessLookupError):  # it has ended, and Ray has waited for it
                        self._daemons.append(_Daemon(name, pid, os.pidfd_open(pid)))
                        self._poll.register(self._daemons[-1].handle, select.POLLIN)

    def _ended(self) -> list[tuple[str, str]]:
        """Names of the daemons that have ended, each with what happened to it."""
        with self._lock:
            handles = {handle for handle, _ in self._poll.poll(0)} if self._daemons else set()
            names = [daemon.name for daemon in self._daemons if daemon.handle in handles]
        killed = {name: f"was stopped for {stopped:.0f} s and then ended" for name, stopped in self._killed.items()}
        return [(name, killed.get(name, "died")) for name in names]

    def _awaited(self) -> str:
        seen = [daemon.name for daemon in self._daemons]
        absent = [name for name in reversed(NAMES) if name not in seen]
        return f"its process {absent[0]}" if absent else f"an answer of {' and '.join(NAMES)}"

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
