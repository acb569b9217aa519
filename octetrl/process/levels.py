"""How a program is locked in: two levels, each tried on this machine by running a program in it.

    landlock      a user id of its own (as root), resource limits, the system-call filter, and Landlock: no file but its
                  own and the interpreter's. Needs no rights and no package, and works in most containers (Linux 5.13)
    bubblewrap    the same inside `bwrap`: namespaces, so that there is no network, no process and no file but its own,
                  and a folder in memory whose size is bounded. Needs the package, and rights that containers often lack

The program's Python is the run's own interpreter without the packages of its virtual environment, unless another is
named: the interpreter of a virtual environment brings that environment's packages. As root the program is another user,
who may not reach an interpreter in a private folder; then the machine's own Python takes its place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from octetrl.process.kernel import landlock_version, sees_descriptors_of_others
from octetrl.process.system_calls import can_filter
from octetrl.process.usage import lists_children
from octetrl.system.errors import UserError

WARDEN_PACKAGE = "/warden/octetrl"  # in bubblewrap's root: where the warden's files are
_PACKAGE = f"{WARDEN_PACKAGE}/process"
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # not zero: a shared mapping of it is not counted
_ROOT_KEEPS = ("SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "KILL", "SYS_PTRACE")  # the warden, not the program
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_SYSTEM_PYTHON = "/usr/bin/python3"
_QUESTION = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"


class Level(StrEnum):
    """From the strongest."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"

    def lacks(self) -> str | None:
        """What keeps this machine from the level, as far as it shows without trying."""
        if sys.platform != "linux":
            return f"sandboxes need Linux, this is {sys.platform}"
        if self is Level.BUBBLEWRAP:
            return None if shutil.which("bwrap") else "bwrap is not installed"
        if landlock_version() == 0:
            return "the kernel has no Landlock, or it is switched off"
        return None if can_filter() else "the kernel takes no system-call filter from us"

    def counts_deleted_files(self) -> bool:
        """Whether disk held by files that are open and deleted counts."""
        return self is Level.BUBBLEWRAP or (lists_children() and sees_descriptors_of_others())

    def gaps(self) -> list[str]:
        """What the level does not protect from on this machine, in words (docs/sandbox.md)."""
        gaps = ["a flaw of the kernel, which is shared with the run"]
        if not lists_children():
            limit = "memory and time of several processes together: this kernel lists no children of processes"
            gaps.append(f"{limit} (CONFIG_PROC_CHILDREN), so each process has the limit for itself")
        if self is Level.BUBBLEWRAP:
            return gaps if can_filter() else [*gaps, "rarely used system calls: there is no filter here"]
        gaps.append("asking whether a path exists, how large and old it is, where a link leads")
        gaps.append("disk use in bursts: it is looked at up to fifty times a second")
        if not self.counts_deleted_files():
            gaps.append("disk held by files that are open and deleted: its processes can't be looked into here")
        if os.geteuid() != 0:
            gaps.append("the number of processes alone: it is counted with all others of the user")
        return gaps


@dataclass(frozen=True, slots=True)
class Interpreter:
    executable: str
    folders: tuple[str, ...]  # what it reads, files among them: none inside another
    links: dict[str, str]  # symbolic links of the root folder, such as /bin -> usr/bin

    def bubblewrap_options(self) -> list[str]:
        bound = [word for folder in self.folders for word in ("--ro-bind", folder, folder)]
        return bound + [word for path, target in self.links.items() for word in ("--symlink", target, path)]


@cache
def find_interpreters(path: str | None = None) -> tuple[Interpreter, ...]:
    """`path`, or else this process's own and the machine's, to be tried in turn. UserError when `path` does not run."""
    if path is None:
        interpreters = [_interpreter(os.path.realpath(sys.executable), [sys.base_prefix, sys.base_exec_prefix])]
        if os.access(_SYSTEM_PYTHON, os.X_OK):
            interpreters.append(_interpreter(os.path.realpath(_SYSTEM_PYTHON), []))
        return tuple(interpreters)
    try:
        answer = subprocess.run([path, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=30, check=True)
        prefixes = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            f"environment.sandbox.python: '{path}' does not run as a Python ({error}); give an interpreter's path"
        ) from error
    return (_interpreter(os.path.abspath(path), [*prefixes, str(Path(os.path.realpath(path)).parent)]),)


def _interpreter(executable: str, prefixes: list[str]) -> Interpreter:
    links = {path: os.readlink(path) for path in _SYSTEM_FOLDERS if os.path.islink(path)}
    wanted = [path for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES) if path not in links and os.path.exists(path)]
    wanted += [place for path in (executable, *prefixes) for place in (path, os.path.realpath(path))]
    folders: list[str] = []
    for path in sorted(set(wanted) - {"/"}, key=len):  # a Python whose prefix is the root has its files in /lib
        if not any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders):
            folders.append(path)
    return Interpreter(executable, tuple(folders), links)


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
    command += interpreter.bubblewrap_options()
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--symlink", "/proc/self/fd/0", "/dev/stdin", "--symlink", "/proc/self/fd/1", "/dev/stdout"]
    command += ["--proc", "/proc", "--ro-bind", str(package), _PACKAGE, "--remount-ro", "/", "--chdir", "/"]
    return [*command, "--"]
