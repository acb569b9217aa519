"""The supervisor of a sandbox: makes a folder and a user for one program, starts it restricted, and removes the folder.

Started as `python -I -S -B -c ...`; in bubblewrap it is the init of the namespace. The order has the program (`source`,
`stdin`, `command`, `environment`, `limits`, `link`) and its place (`level`, `number`, `folder`, in it `work` and
`main`, and what else it may use: `folders`, `devices`).
From the message `started` on, a failure of this process, by an error or by a signal, is the program's doing.
"""

from __future__ import annotations

import os
import pwd
import resource
import signal
import sys
from collections.abc import Callable

from octetrl.process import usage
from octetrl.process.kernel import (
    KEEPS_SIGNALS,
    die_with_parent,
    give_up_privileges_for_good,
    hide_from_other_processes,
    install_filter,
    landlock_version,
    restrict,
)
from octetrl.process.supervisor import Supervisor, receive_order, send
from octetrl.process.system_calls import can_filter, filter_program

_FIRST_PRIVATE_USER = 2_000_000_000
_OVERFLOW_USER = 65534  # "nobody", and every user without an id here
_STACK_BYTES = 8 << 20
_WARDENS = 3
_NO_CRASH_HANDLER = 1  # byte: with 0, a core pattern that is a program still runs, as root and past every limit


def main() -> None:
    """Serve one order and exit."""
    lifeline = int(sys.argv[-1])
    os.umask(0o022)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)  # the lifeline ends this process, and nothing else does
    order = receive_order(lifeline)
    if order is None:
        return
    try:
        report = _serve(lifeline, order)
    except OSError as error:
        report = {"error": str(error)}
    send(lifeline, report)


def _serve(lifeline: int, order: dict) -> dict:
    """One sandbox, from an empty folder to a report."""
    is_root, in_bubblewrap = os.geteuid() == 0, order["level"] == "bubblewrap"
    limits, folder, work = order["limits"], order["folder"], order["work"]
    program = os.path.dirname(order["main"])
    user = _private_user(order["number"]) if is_root else os.geteuid()
    # in bubblewrap deleted files have no more room than the others
    supervisor = Supervisor(lifeline, limits, folder=work, counts_deleted=not in_bubblewrap)
    hide_from_other_processes()
    limits["user_processes"] = limits["processes"] + _processes_of_others(in_bubblewrap)
    os.mkdir(folder, 0o711)
    try:
        os.mkdir(program, 0o755)
        with open(order["main"], "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(order["source"])
        os.mkdir(work, 0o700)
        os.chown(work, user, user if is_root else -1)

        def enter() -> None:
            _set_limits(limits)
            _restrict([*order["folders"], program], [work, *order["devices"]], user, in_bubblewrap=in_bubblewrap)
            os.chdir(work)
            os.execve(order["command"][0], order["command"], order["environment"])

        owner = user if is_root else None  # who may open /dev/stdin, which is a pipe
        supervisor.start(enter, stdin=order["stdin"], owner=owner, link=order["link"])
        return supervisor.watch()
    finally:
        # in bubblewrap the folder is in memory that ends with this process; what still lives could lead us astray
        if not in_bubblewrap and not usage.processes():
            _empty_and_remove(folder)


# ------------------------------------------------------------ in the child, between fork and exec


def _restrict(readable: list[str], writable: list[str], user: int, *, in_bubblewrap: bool) -> None:
    """Give up all rights that the program does not need. Each step needs rights that a later one gives up. All
    descriptors except the streams and the socket (number 3) close at exec."""
    same_user = os.geteuid() != 0
    if not same_user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    die_with_parent(signal.SIGKILL)  # once more: a change of user clears it
    give_up_privileges_for_good()
    if version := landlock_version():
        restrict(readable, writable)
    if can_filter():
        shares_user = same_user and not in_bubblewrap
        signals_open = shares_user and version < KEEPS_SIGNALS
        install_filter(filter_program(same_user=shares_user, signals_open=signals_open, pid=os.getpid()))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
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


# ------------------------------------------------------------ users


def _private_user(number: int) -> int:
    """A user id that nobody has, a different one for each running sandbox. number: the id of a living process."""
    with open("/proc/self/uid_map") as lines:
        mapped = [range(first, first + count) for first, _, count in (map(int, line.split()) for line in lines)]
    return choose_user(number, mapped, _is_somebodys)


def choose_user(number: int, mapped: list[range], is_somebodys: Callable[[int], bool]) -> int:
    """A user id for sandbox `number` among those that this user namespace has, the ranges `mapped`: high up, and not
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
    except KeyError:
        return _num_threads(user) > 0
    return True


def _processes_of_others(in_bubblewrap: bool) -> int:
    """What RLIMIT_NPROC must allow beyond the sandbox's own processes. The kernel counts those of a user id: as root it
    is the sandbox's own; in a user namespace they are its own since Linux 5.14, the warden among them; elsewhere they
    are all that the user runs now, and sandboxes started together share what they may."""
    if os.geteuid() == 0:
        return 0
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2])
    return _WARDENS if in_bubblewrap and (major, minor) >= (5, 14) else _num_threads(os.geteuid())


def _num_threads(user: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended meanwhile
            continue
    return count


# ------------------------------------------------------------ the folder's end


def _empty_and_remove(folder: str) -> None:
    """Remove `folder` whatever is in it: modes that forbid it, trees too deep for a path or for recursion.

    Folders inside folders are moved up beside them until there is one level only. Called when no process of the sandbox
    lives: one that did could lead this astray by a link. That the program has removed the folder itself is no failure.
    """
    frontier = [folder] if os.path.lexists(folder) else []
    while frontier:
        place = frontier.pop()
        os.chmod(place, 0o700)
        with os.scandir(place) as entries:
            listed = list(entries)
        for entry in listed:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif place == folder:
                frontier.append(entry.path)
            else:
                os.chmod(entry.path, 0o700)
                moved = os.path.join(folder, os.urandom(12).hex())  # a name that the program could not take before
                os.rename(entry.path, moved)
                frontier.append(moved)
        if place != folder:
            os.rmdir(place)
    if os.path.lexists(folder):
        os.rmdir(folder)
