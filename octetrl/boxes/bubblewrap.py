"""Boxes by bubblewrap, without root's rights, images or a daemon.

The root is a folder with a file system, of which an overlay in memory takes the changes, or else this machine's system
folders, to read, and empty folders in memory. Commands enter the namespaces of the box (enter.py) and give up all
capabilities. Nothing is left on disk. There is no control group: memory is limited for each process, and the number of
processes by their namespace.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octetrl.boxes.box import MOST_PROCESSES, PAYLOAD, Box, BoxError, program_of
from octetrl.boxes.relay import ENTER, open_namespaces
from octetrl.process.levels import find_interpreters

if TYPE_CHECKING:  # pydantic takes as long to import as a reward process takes to start
    from octetrl.config.box import BoxConfig

_CONFIGURATION = (
    *("/etc/ssl", "/etc/ca-certificates", "/etc/pki", "/etc/passwd", "/etc/group", "/etc/hosts"),
    *("/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/localtime", "/etc/profile", "/etc/bash.bashrc"),
)
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_SCRATCH = "/sys"  # covered in a mount namespace of its own, where nothing needs it
_MIB = 1 << 20


class BubblewrapBox(Box):
    def __init__(self, config: BoxConfig) -> None:
        super().__init__(config)
        self._pid = 0

    def start_command(self) -> list[str]:
        config, image = self.config, self.config.image
        words = [*program_of(config), "--unshare-user", "--uid", "0", "--gid", "0", "--hostname", "box"]
        words += ["--cap-drop", "ALL", *(f"--unshare-{name}" for name in ("pid", "ipc", "uts", "cgroup-try"))]
        words += ["--clearenv", "--setenv", "PATH", _ENVIRONMENT["PATH"]]  # the run's has keys
        words += ["--unshare-net"] if config.network == "off" else []
        words += self._machine() if image is None else ["--bind", f"{_SCRATCH}/root", "/", "--chdir", "/"]
        words += ["--as-pid-1", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
        words += ["--remount-ro", "/"] if image is None else []
        words += [*config.options, "--", "sh", "-c", PAYLOAD]
        return words if image is None else _over(image, config.memory_mib, words)

    def _machine(self) -> list[str]:
        """This machine's programs, the interpreter of the run among them, and room to write."""
        words = find_interpreters()[0].bubblewrap_options()
        for path in _CONFIGURATION:
            words += ["--ro-bind-try", os.path.realpath(path), path]
        for folder in ("/tmp", "/work"):
            words += ["--size", str(self.config.memory_mib * _MIB), "--tmpfs", folder]
        return [*words, "--chdir", "/work"]

    def started(self) -> None:
        assert self._process is not None
        bwrap = self._process.pid
        (self._pid,) = map(int, Path(f"/proc/{bwrap}/task/{bwrap}/children").read_text().split())
        self.descriptors = (open_namespaces(self._pid),)

    def client(self, command: Sequence[str], env: Mapping[str, str], user: str | None, *, reads: bool) -> list[str]:
        if user not in (None, "root", "0"):
            raise BoxError(f"user {user}: boxes of bubblewrap have root alone; leave user out")
        folder = "/work" if self.config.image is None else "/"
        given = {**_ENVIRONMENT, "HOME": "/root", **env}
        if self.config.image is None:  # the run's own Python comes first
            own = os.path.dirname(find_interpreters()[0].executable)
            given = {**given, "PATH": f"{own}:{given['PATH']}", "HOME": "/work", **env}
        order = {
            "namespaces": self.descriptors[0],
            "command": list(command),
            "env": given,
            "cwd": folder,
            "memory_bytes": self.config.memory_mib * _MIB,
            "processes": MOST_PROCESSES,
        }
        return [*ENTER, json.dumps(order)]

    def find_pid(self) -> int:
        return self._pid

    def clean(self, *, ended_by_itself: bool) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def _over(image: str, memory_mib: int, command: Sequence[str]) -> list[str]:
    """The command, where `_SCRATCH`/root is an overlay of the folder `image`, with its changes in memory."""
    folder = os.path.abspath(image)
    if not os.path.isdir(folder):
        raise BoxError(f"no folder '{image}'; give a folder with a root file system in environment.box.image")
    if any(letter in folder for letter in ":,\\"):
        raise BoxError(f"'{folder}' has one of : , \\, which a mount can't name; give another path")
    options = f"lowerdir={folder},upperdir={_SCRATCH}/changes,workdir={_SCRATCH}/scratch"
    script = f"""mount -t tmpfs -o size={memory_mib}m octetrl {_SCRATCH} &&
mkdir {_SCRATCH}/root {_SCRATCH}/changes {_SCRATCH}/scratch &&
mount -t overlay -o {shlex.quote(options)} octetrl {_SCRATCH}/root && exec "$@" """
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command]
