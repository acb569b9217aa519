"""Measures what a sandbox's processes use together, and ends them.

The kernel limits each process alone. This module adds up memory and time of all processes from /proc, every few
hundredths of a second. The processes are the descendants of this one, which adopts orphans. /proc is read as bytes,
because a process name may contain any bytes.
"""

from __future__ import annotations

import os
import signal
import time
from functools import cache

from octetrl.process.linux import sees_descriptors_of_others

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_END_SECONDS = 10.0
_WMEM_DEFAULT = 212_992  # the kernel's, where /proc does not tell the machine's
_PIPE_BYTES = 1 << 16  # the kernel's default, which the filter keeps the program from raising


def processes() -> list[int]:
    """Ids of the sandbox's processes."""
    found, frontier = [], [os.getpid()]
    while frontier:
        children = _children(frontier.pop())
        found += children
        frontier += children
    return found


def lists_children() -> bool:
    """Whether the kernel lists a process's children (CONFIG_PROC_CHILDREN). Without the list `processes` is empty."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of living processes, and of dead ones as far as a living process waited for them."""
    ticks = 0
    for pid in pids:
        words = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        ticks += sum(map(int, words[11:15])) if words else 0
    used = os.times()
    return ticks / _TICKS + used.children_user + used.children_system


def memory_bytes(pids: list[int], enough: int) -> int:
    """Memory of all processes in bytes; shared pages count once. A cheap sum, which counts shared pages several times,
    is returned if it is below `enough`. The exact sum is slow, and a burst could grow meanwhile, so it stops as soon as
    it exceeds `enough`."""
    resident = sum(_resident(pid) for pid in pids)
    if resident <= enough:
        return resident
    total = 0
    for pid in pids:
        total += _proportional(pid)
        if total > enough:
            break
    return total


def buffer_bytes(pids: list[int], max_descriptors: int) -> int:
    """The most that the kernel holds in the pipes and sockets of these processes, each counted once and as if full.

    A process whose descriptors may not be seen counts as if all of them were sockets. One that is in flight through a
    socket is not seen; the kernel bounds those of a user by the number of open files."""
    if not sees_descriptors_of_others():
        return 0
    socket_bytes = _socket_bytes()
    found: set[str] = set()
    hidden = 0
    for pid in pids:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):  # each may have a table of its own
                found |= _pipes_and_sockets(f"/proc/{pid}/task/{thread}/fd")
        except PermissionError:
            hidden += _resident(pid) > 0  # else it is about to end
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    sockets = sum(name.startswith("socket:") for name in found)
    return (len(found) - sockets) * _PIPE_BYTES + (sockets + hidden * max_descriptors) * socket_bytes


def _pipes_and_sockets(folder: str) -> set[str]:
    found = set()
    for descriptor in os.listdir(folder):
        try:
            name = os.readlink(f"{folder}/{descriptor}")
        except FileNotFoundError:  # closed meanwhile
            continue
        if name.startswith(("pipe:", "socket:")):
            found.add(name)
    return found


@cache
def _socket_bytes() -> int:
    """That one end may have sent and nobody has read: a message may start just below the bound and be as large."""
    return 2 * int(_read("/proc/sys/net/core/wmem_default") or _WMEM_DEFAULT)


def end_all(leader: int) -> bool:
    """Kill every process of the sandbox and wait for each; whether none is left.

    One signal to all at once, which a fork bomb can't outrun: to the group, which the filter lets no process leave, or
    to the whole namespace where there is one. Without either, descendants are hunted one by one until none is left.
    """
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        for pid in (-1,) if os.getpid() == 1 else (-leader, *processes()):
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(0.001)
    return False


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(word) for thread in threads for word in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _resident(pid: int) -> int:
    words = _read(f"/proc/{pid}/statm").split()
    return int(words[1]) * _PAGE if words else 0


def _proportional(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident(pid)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended meanwhile
        return b""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return
