"""Counts what the processes below this one use together: memory, time, buffers of the kernel, files.

The kernel limits each process alone. This module adds up all processes from /proc, where it can see them: they are the
descendants of this process, which adopts orphans. /proc is read as bytes, because a process name may contain any bytes.

Two kinds of files are counted: those in the folder, and deleted files that a process still holds open or mapped. If
something prevents counting (a folder without read permission, a process that hides its descriptors), this counts as
exceeding the limit, because a program in a sandbox does not need it. While a program runs, it may replace any folder by
a link between two calls. Counting only reads, so this is harmless.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from functools import cache

from octetrl.process.kernel import sees_descriptors_of_others

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WMEM_DEFAULT = 212_992  # the kernel's, where /proc does not tell the machine's
_PIPE_BYTES = 1 << 16  # the kernel's default, which the filter keeps the program from raising


def processes() -> list[int]:
    """Ids of the sandbox's processes."""
    pids = [os.getpid()]
    for pid in pids:  # which grows
        pids += _children(pid)
    return pids[1:]


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


def memory_bytes(pids: list[int], enough: float) -> int:
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
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for held in _open_files(pid):
                if stat.S_ISFIFO(held.st_mode) or stat.S_ISSOCK(held.st_mode):
                    size = _PIPE_BYTES if stat.S_ISFIFO(held.st_mode) else _socket_bytes()
                    sizes[held.st_dev, held.st_ino] = size
        except PermissionError:
            if _has_memory(pid):  # so it is not merely about to end: it hides
                sizes[0, -pid] = max_descriptors * _socket_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return sum(sizes.values())


def _open_files(pid: int) -> Iterator[os.stat_result]:
    """What a process has open. Each of its threads may have a table of its own."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        table = f"/proc/{pid}/task/{thread}/fd"  # of one that has ended meanwhile there is none; the others still count
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), os.scandir(table) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    yield os.stat(entry.path)


@cache
def _socket_bytes() -> int:
    """That one end may have sent and nobody has read: a message may start just below the bound and be as large."""
    return 2 * int(_read("/proc/sys/net/core/wmem_default") or _WMEM_DEFAULT)


def folder_use(folder: str, max_files: int) -> tuple[int, int]:
    """Bytes and number of files below `folder`; counting stops past `max_files`."""
    count = size = 0
    frontier = [folder]
    while frontier and count <= max_files:
        try:
            entries = os.scandir(frontier.pop())
        except (FileNotFoundError, NotADirectoryError):  # removed or replaced meanwhile
            continue
        except OSError:  # no permission to read it, or its path is too long for the kernel: neither happens by accident
            return size, max_files + 1
        with entries:
            for entry in entries:
                count += 1
                if count > max_files:
                    break
                try:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    is_folder = entry.is_dir(follow_symlinks=False)
                except FileNotFoundError:  # this one is removed; those after it still count
                    continue
                except OSError:
                    return size, max_files + 1
                if is_folder:
                    frontier.append(entry.path)
    return size, count


def deleted_use(pids: list[int], folder: str, max_files: int) -> tuple[int, int]:
    """Bytes and number of the deleted files that processes `pids` hold open, or mapped from below `folder`.

    A mapped one counts with what is mapped of it, for only the machine's administrator is shown its size. One that is
    underway in a socket is not seen; the kernel bounds those of a user by the number of open files."""
    if not sees_descriptors_of_others():
        return 0, 0
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for held in _open_files(pid):
                if held.st_nlink == 0 and stat.S_ISREG(held.st_mode):
                    sizes[held.st_dev, held.st_ino] = held.st_blocks * 512
            _note_mappings(pid, os.fsencode(folder) + b"/", sizes)
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except PermissionError:
            if _has_memory(pid):
                return sum(sizes.values()), max_files + 1
    return sum(sizes.values()), len(sizes)


def _note_mappings(pid: int, below: bytes, sizes: dict[tuple[int, int], int]) -> None:
    mapped: dict[tuple[int, int], int] = {}
    with open(f"/proc/{pid}/maps", "rb") as lines:
        for line in lines:
            if not line.endswith(b" (deleted)\n"):
                continue
            span, _, _, device, inode, path = line.split(None, 5)
            if path.startswith(below):
                first, _, last = span.partition(b"-")
                major, _, minor = device.partition(b":")
                key = os.makedev(int(major, 16), int(minor, 16)), int(inode)
                mapped[key] = mapped.get(key, 0) + int(last, 16) - int(first, 16)
    for key, size in mapped.items():
        sizes[key] = max(sizes.get(key, 0), size)


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(word) for thread in threads for word in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _has_memory(pid: int) -> bool:
    return _read(f"/proc/{pid}/statm").partition(b" ")[0] not in (b"", b"0")


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
