"""What the sandboxed process takes on itself, between fork and exec, before the first line of foreign code.

In this order, since each step needs rights that a later one gives up: a session of its own, its descriptors, its
resource limits, another user (as root), no new privileges, Landlock, the system-call filter. Descriptors other than the
streams and the link, which is number 3, close at exec.
"""

from __future__ import annotations

import os
import resource
import signal

from octetrl.environments.sandbox.landlock import KEEPS_SIGNALS, landlock_version, restrict
from octetrl.environments.sandbox.linux import die_with_parent, give_up_privileges_for_good, install_filter
from octetrl.environments.sandbox.system_calls import can_filter, filter_program

_FIRST_PRIVATE_USER = 2_000_000_000
_STACK_BYTES = 8 << 20
_WARDENS = 3


def private_user(number: int) -> int:
    """A user id that nobody has, of its own for each running sandbox: `number` is that of a live process."""
    if os.geteuid() != 0:
        return os.geteuid()
    mapped = 0
    with open("/proc/self/uid_map") as lines:
        for line in lines:
            first, _, count = map(int, line.split())
            mapped = max(mapped, first + count)
    user = _FIRST_PRIVATE_USER + number
    return user if user < mapped else max(1, mapped // 2 + number % max(1, mapped // 2))


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


def restrain(
    descriptors: list[int], request: dict, user: int, work: str, landlock: tuple[list[str], list[str]]
) -> None:
    """Called in the child. descriptors: become 0, 1, ...; work: the folder of `user`, to be in; landlock: what may be
    read and what may be written, where the level has it."""
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    _set_limits(request["limits"])
    same_user = os.geteuid() != 0
    if not same_user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(work)
    die_with_parent(signal.SIGKILL)
    give_up_privileges_for_good()
    version = landlock_version() if request["level"] != "limits" else 0
    if version:
        restrict(*landlock)
    if can_filter():
        shares_user = same_user and request["level"] != "bubblewrap"
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
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_SIGPENDING, 64, 64),
    ):
        highest = resource.getrlimit(name)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(name, (soft, hard))
