"""How well this machine can lock a program in: three levels, tried from the strongest, each by running a program in it.

    limits        resource limits, a user id of its own (as root), the system-call filter where the kernel takes one
    landlock      the same, and Landlock: no file but its own and the interpreter's. Needs no rights and no package, and
                  works in most containers (Linux 5.13)
    bubblewrap    the same inside `bwrap`: namespaces, so that there is no network, no process and no file but its own,
                  and a folder in memory whose size is bounded. Needs the package, and rights that containers often lack

`Protection.gaps` says what a level on this machine does not protect from; docs/sandbox.md explains.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from octetrl.process.interpreter import Interpreter
from octetrl.process.kernel import KEEPS_SIGNALS, landlock_version, sees_descriptors_of_others
from octetrl.process.system_calls import can_filter
from octetrl.process.usage import lists_children

WARDEN_PACKAGE = "/warden/octetrl"  # in bubblewrap's root: where the warden's files are
_PACKAGE = f"{WARDEN_PACKAGE}/process"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # not zero: a shared mapping of it is not counted
_ROOT_KEEPS = ("SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "KILL", "SYS_PTRACE")  # the warden, not the program


class Level(StrEnum):
    """From the weakest."""

    LIMITS = "limits"
    LANDLOCK = "landlock"
    BUBBLEWRAP = "bubblewrap"

    def is_at_least(self, other: Level) -> bool:
        order = list(Level)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Protection:
    """What a level on this machine keeps a program from. Tests hold each against an attack."""

    level: Level
    has_filter: bool
    landlock: int  # its version; 0: not used
    as_root: bool

    @property
    def network(self) -> bool:
        return self.level is Level.BUBBLEWRAP or self.has_filter

    @property
    def files(self) -> bool:
        """Whether it sees no file but its own and the interpreter's."""
        return self.level is not Level.LIMITS

    @property
    def memory(self) -> bool:
        """Whether it can neither read nor write the run's memory and environment."""
        return self.files or self.as_root

    @property
    def signals(self) -> bool:
        """Whether it can signal no process but its own."""
        return self.level is Level.BUBBLEWRAP or self.as_root or self.has_filter or self.landlock >= KEEPS_SIGNALS

    @property
    def sums(self) -> bool:
        """Whether memory and time of all its processes together are limited, and not of each alone."""
        return lists_children()

    @property
    def deleted_files(self) -> bool:
        """Whether disk held by files that are open and deleted counts."""
        return self.level is Level.BUBBLEWRAP or (self.sums and sees_descriptors_of_others())

    @property
    def gaps(self) -> list[str]:
        """What it does not protect from, in words."""
        found = ["a flaw of the kernel, which is shared with the run"]
        if not self.sums:
            limit = "memory and time of several processes together: this kernel lists no children of processes"
            found.append(f"{limit} (CONFIG_PROC_CHILDREN), so each process has the limit for itself")
        if self.level is Level.BUBBLEWRAP:
            return found if self.has_filter else [*found, "rarely used system calls: there is no filter here"]
        found.append("asking whether a path exists, how large and old it is, where a link leads")
        found.append("disk use in bursts: it is looked at up to fifty times a second")
        if not self.deleted_files:
            found.append("disk held by files that are open and deleted: its processes can't be looked into here")
        if not self.as_root:
            found.append("the number of processes alone: it is counted with all others of the user")
        if not self.network:
            found.append("the network")
        if not self.files:
            what = "files that all users may read" if self.as_root else "all files of the user, to read and to write"
            found.append(f"{what}, and folders that all may write")
        if not self.memory:
            found.append("the run's environment and memory")
        if not self.signals:
            found.append("signals to the run")
        if not self.has_filter:
            hunt = "they are hunted one by one" if self.sums else "nobody finds them"
            found.append(f"processes that leave their group to outlive it: {hunt}")
        return found


def protection(level: Level) -> Protection:
    return Protection(level, can_filter(), 0 if level is Level.LIMITS else landlock_version(), os.geteuid() == 0)


def lacking(level: Level) -> str | None:
    """What keeps this machine from that level, as far as it shows without trying."""
    if sys.platform != "linux":
        return f"sandboxes need Linux, this is {sys.platform}"
    if level is Level.LANDLOCK and landlock_version() == 0:
        return "the kernel has no Landlock, or it is switched off"
    if level is Level.LANDLOCK and not can_filter():
        return "the kernel takes no system-call filter from us"
    if level is Level.BUBBLEWRAP and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    return None


def bubblewrap_command(interpreter: Interpreter, package: Path, room_bytes: int) -> list[str]:
    """`bwrap` around the warden: the folders of `interpreter` and of this `package`, and an empty /tmp of that size."""
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--clearenv", "--as-pid-1", "--cap-drop", "ALL"]
    command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    command += ["--hostname", "sandbox"]
    if os.geteuid() == 0:
        for name in _ROOT_KEEPS:
            command += ["--cap-add", f"CAP_{name}"]
    else:
        command.append("--unshare-user")
    command += ["--perms", "0755", "--size", str(room_bytes), "--tmpfs", "/tmp"]  # before what it may hold
    shown = (*interpreter.folders, _PACKAGE, *DEVICES)
    for above in sorted({str(parent) for path in shown for parent in Path(path).parents}):
        if above not in ("/", "/tmp"):
            command += ["--perms", "0755", "--dir", above]  # by itself it would make them for its own user alone
    for folder in interpreter.folders:
        command += ["--ro-bind", folder, folder]
    for path, target in interpreter.links.items():
        command += ["--symlink", target, path]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--symlink", "/proc/self/fd/0", "/dev/stdin", "--symlink", "/proc/self/fd/1", "/dev/stdout"]
    command += ["--proc", "/proc", "--ro-bind", str(package), _PACKAGE, "--remount-ro", "/", "--chdir", "/"]
    return [*command, "--"]
