"""Restricts the sandboxed process, between fork and exec, before foreign code runs.

The order matters, because each step needs rights that a later one gives up: resource limits, another user (as root), no
new privileges, Landlock, the system-call filter. All descriptors except the streams and the socket (number 3) close at
exec.
"""

from __future__ import annotations

import os
import pwd
import resource
import signal
from collections.abc import Callable

from octetrl.process.kernel import (
    KEEPS_SIGNALS,
    die_with_parent,
    give_up_privileges_for_good,
    install_filter,
    landlock_version,
    restrict,
)
from octetrl.process.system_calls import can_filter, filter_program

_FIRST_PRIVATE_USER = 2_000_000_000
_OVERFLOW_USER = 65534  # "nobody", and every user without an id here
_STACK_BYTES = 8 << 20
_WARDENS = 3
_NO_CRASH_HANDLER = 1  # byte: with 0, a core pattern that is a program still runs, as root and past every limit


def private_user(number: int) -> int:
    """An unused user id, a different one for each running sandbox. `number` is the id of a living process."""
    if os.geteuid() != 0:
        return os.geteuid()
    with open("/proc/self/uid_map") as lines:
        mapped = [range(first, first + count) for first, _, count in (map(int, line.split()) for line in lines)]
    return choose_user(number, mapped, _is_somebodys)


def choose_user(number: int, mapped: list[range], is_somebodys: Callable[[int], bool]) -> int:
    """Of the user ids that this user namespace has, ranges `mapped`: one for sandbox `number`, high up, that is not
    anybody's. Raises OSError where there is none."""
    wanted = _FIRST_PRIVATE_USER + number
    if any(wanted in ids for ids in mapped):
        return wanted
    largest = max(mapped, key=len)
    upper = largest[len(largest) // 2 :]
    for step in range(len(upper)):
        user = upper[(number + step) % len(upper)]
        if user not in (0, _OVERFLOW_USER) and not is_somebodys(user):
            return user
    raise OSError("this user namespace maps no user id that is free, so a program can't be a user of its own")


def _is_somebodys(user: int) -> bool:
    """Whether an account or a process has that id."""
    try:
        pwd.getpwuid(user)
        return True
    except KeyError:
        pass
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                return True
        except OSError:  # it has ended meanwhile
            continue
    return False


def process_limit(processes: int, *, alone: bool) -> int:
    """What RLIMIT_NPROC must say for a sandbox to have `processes`. The kernel counts those of a user id: as root it is
    the sandbox's own; in a user namespace they are its own since Linux 5.14, the warden among them; elsewhere they are
    all that the user runs, so what runs now is added, and sandboxes started together share what they may."""
    if os.geteuid() == 0:
        return processes
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2])
    if alone and (major, minor) >= (5, 14):
        return processes + _WARDENS
    return processes + _threads_of_user(os.geteuid())


def _threads_of_user(user: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended meanwhile
            continue
    return count


def restrain(order: dict, user: int, work: str, landlock: tuple[list[str], list[str]]) -> None:
    """Called in the child, which has its streams and its session. work: the folder of `user`, to be in; landlock: what
    may be read and what may be written, where the level has it."""
    _set_limits(order["limits"])
    same_user = os.geteuid() != 0
    if not same_user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(work)
    die_with_parent(signal.SIGKILL)  # once more: another user's process forgets it
    give_up_privileges_for_good()
    version = landlock_version() if order["level"] != "limits" else 0
    if version:
        restrict(*landlock)
    if can_filter():
        shares_user = same_user and order["level"] != "bubblewrap"
        signals_open = shares_user and version < KEEPS_SIGNALS
        install_filter(filter_program(same_user=shares_user, signals_open=signals_open, pid=os.getpid()))
    for signal_number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signal_number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _set_limits(limits: dict[str, int]) -> None:
    seconds = limits["cpu_seconds"]
    for name, soft, hard in (
        (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"], limits["disk_bytes"]),
        (resource.RLIMIT_NPROC, limits["user_processes"], limits["user_processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_STACK, _STACK_BYTES, _STACK_BYTES),
        (resource.RLIMIT_CORE, _NO_CRASH_HANDLER, _NO_CRASH_HANDLER),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, 64, 64),
    ):
        highest = resource.getrlimit(name)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(name, (soft, hard))
