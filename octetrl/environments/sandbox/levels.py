"""How well this machine can lock a program in: three levels, tried from the best, each by running a program in it.

    bubblewrap    `bwrap` makes namespaces and a root of their own
    namespaces    the same, made by ourselves (as root, or where users may make user namespaces)
    limits        no namespaces: resource limits, another user id (as root), Landlock, the system-call filter

All three drop rights, limit resources and filter system calls. `gaps` says what a level on this machine does not
protect from; docs/sandbox.md explains. Which level a machine gives follows from its kernel, its container and its
packages, so it is measured, once in a process.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from octetrl.environments.sandbox.interpreter import Interpreter
from octetrl.environments.sandbox.landlock import KEEPS_SIGNALS, landlock_version
from octetrl.environments.sandbox.system_calls import can_filter


class Level(StrEnum):
    """From the strongest."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    LIMITS = "limits"


@dataclass(frozen=True, slots=True)
class Protection:
    """What a level on this machine keeps a program from. Tests hold each against an attack."""

    level: Level
    has_filter: bool
    landlock: int  # its version; 0: none
    as_root: bool

    @property
    def network(self) -> bool:
        return self.level is not Level.LIMITS or self.has_filter

    @property
    def files(self) -> bool:
        """Whether it sees no file but its own and the interpreter's."""
        return self.level is not Level.LIMITS or self.landlock > 0

    @property
    def parent(self) -> bool:
        """Whether it can neither read the run's memory and environment nor signal it."""
        return self.files or self.as_root

    @property
    def leaves_no_process(self) -> bool:
        """Whether one signal ends all its processes at once."""
        return self.level is not Level.LIMITS or self.has_filter

    @property
    def gaps(self) -> list[str]:
        """What it does not protect from, in words."""
        found = ["a flaw of the kernel, which is shared with the run", "what the time of its own work tells"]
        if not self.has_filter:
            found.append("rarely used system calls: there is no filter here")
        if self.level is not Level.LIMITS:
            return found
        found.append("its disk use is looked at ten times a second, not bounded: a fast writer overshoots")
        if not self.as_root:
            found.append("its number of processes is counted with all others of the user")
        if not self.network:
            found.append("the network")
        if self.landlock == 0:
            what = "files that all users may read" if self.as_root else "all files of the user, to read and to write"
            found.append(f"{what}; files left in folders that all may write")
        if not self.parent:
            found.append("the run's environment and memory")
        if not self.as_root and self.landlock < KEEPS_SIGNALS and not self.has_filter:
            found.append("signals to the run")
        return found


def protection(level: Level) -> Protection:
    return Protection(level, can_filter(), landlock_version(), os.geteuid() == 0)


def find_level(try_out: Callable[[Level], str | None], least: Level) -> tuple[Level | None, dict[Level, str]]:
    """The best level that works, none weaker than `least`, and why each better one does not.

    try_out: runs a program in a sandbox of that level; None, or what went wrong.
    """
    reasons: dict[Level, str] = {}
    for level in Level:
        reason = _missing(level) or try_out(level)
        if reason is None:
            return level, reasons
        reasons[level] = reason
        if level is least:
            break
    return None, reasons


def _missing(level: Level) -> str | None:
    if sys.platform != "linux":
        return f"sandboxes need Linux, this is {sys.platform}"
    if level is Level.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    return None


def bubblewrap_command(interpreter: Interpreter, package: str, channel: int) -> list[str]:
    """`bwrap` and what the room shows; the warden inside mounts the rest, so it keeps that one right."""
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--clearenv"]
    command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    if os.geteuid() != 0:
        command.append("--unshare-user")
    command += ["--as-pid-1", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    if os.geteuid() == 0:
        for name in ("SETUID", "SETGID", "CHOWN", "KILL", "SYS_PTRACE"):
            command += ["--cap-add", f"CAP_{name}"]
    for folder in interpreter.folders:
        command += ["--ro-bind", folder, folder]
    for path, target in interpreter.links.items():
        command += ["--symlink", target, path]
    for device in ("null", "zero", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--symlink", "/tmp", "/dev/shm", "--proc", "/proc", "--dir", "/tmp", "--dir", "/program"]
    command += ["--ro-bind", package, "/warden/octetrl/environments/sandbox", "--remount-ro", "/", "--chdir", "/"]
    return [*command, "--", interpreter.executable]
