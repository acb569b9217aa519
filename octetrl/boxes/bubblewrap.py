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
import shutil
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from octetrl.boxes.box import MOST_PROCESSES, PAYLOAD, Box, BoxError
from octetrl.boxes.relay import ENTER, open_namespaces
from octetrl.config.box import BoxConfig
from octetrl.process.levels import find_interpreters

_NAMESPACES = ("user", "pid", "mnt", "ipc", "uts", "net")  # the user namespace first: it gives the right to enter
_CONFIGURATION = (
    *("/etc/ssl", "/etc/ca-certificates", "/etc/pki", "/etc/passwd", "/etc/group", "/etc/hosts"),
    *("/etc/nsswitch.conf", "/etc/resolv.conf", "/etc/localtime", "/etc/profile", "/etc/bash.bashrc"),
)
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_SCRATCH = "/sys"  # covered in a mount namespace of its own, where nothing needs it
_MIB = 1 << 20


class BubblewrapBox(Box):
    client_env: Mapping[str, str] | None = MappingProxyType({})  # a box sees that of its processes before they begin

    def __init__(self, config: BoxConfig) -> None:
        super().__init__(config)
        self._namespaces: list[int] = []
        self._info, self._info_end = -1, -1
        self._pid = 0

    def start_command(self) -> tuple[list[str], list[int]]:
        config, image = self.config, self.config.image
        program = [*(config.program or ["bwrap"])]
        if shutil.which(program[0]) is None:
            raise BoxError(f"{program[0]} is not installed; install bubblewrap, or choose another environment.box.kind")
        self._info, self._info_end = os.pipe()
        words = [*program, "--unshare-user", "--uid", "0", "--gid", "0", "--hostname", "box", "--cap-drop", "ALL"]
        words += [f"--unshare-{name}" for name in ("pid", "ipc", "uts", "cgroup-try")]
        words += ["--clearenv", "--setenv", "PATH", _ENVIRONMENT["PATH"]]  # the run's has keys
        words += ["--unshare-net"] if config.network == "off" else []
        words += self._machine() if image is None else ["--bind", f"{_SCRATCH}/root", "/", "--chdir", "/"]
        words += ["--as-pid-1", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
        words += ["--info-fd", str(self._info_end)]
        words += ["--remount-ro", "/"] if image is None else []
        words += [*config.options, "--", "sh", "-c", PAYLOAD]
        return (words if image is None else _over(image, config.memory_mib, words)), [self._info_end]

    def _machine(self) -> list[str]:
        """This machine's programs, the interpreter of the run among them, and room to write."""
        interpreter, words = find_interpreters()[0], list[str]()
        for folder in interpreter.folders:
            words += ["--ro-bind", folder, folder]
        for path, target in interpreter.links.items():
            words += ["--symlink", target, path]
        for path in _CONFIGURATION:
            words += ["--ro-bind-try", os.path.realpath(path), path]
        for folder in ("/tmp", "/work"):
            words += ["--size", str(self.config.memory_mib * _MIB), "--tmpfs", folder]
        return [*words, "--chdir", "/work"]

    def started(self) -> None:
        os.close(self._info_end)
        with open(self._info) as info:
            self._pid = json.load(info)["child-pid"]
        self._info = self._info_end = -1
        self._namespaces = open_namespaces(self._pid, _NAMESPACES)

    def client(
        self, command: Sequence[str], env: Mapping[str, str], user: str | None, *, reads: bool
    ) -> tuple[list[str], list[int]]:
        if user not in (None, "root", "0"):
            raise BoxError(f"user {user}: boxes of bubblewrap have root alone; leave user out")
        folder = "/work" if self.config.image is None else "/"
        given = {**_ENVIRONMENT, "HOME": "/root", **env}
        if self.config.image is None:  # the run's own Python comes first
            own = os.path.dirname(find_interpreters()[0].executable)
            given = {**given, "PATH": f"{own}:{given['PATH']}", "HOME": "/work", **env}
        order = {
            "namespaces": self._namespaces,
            "command": list(command),
            "env": given,
            "cwd": folder,
            "memory_bytes": self.config.memory_mib * _MIB,
            "processes": MOST_PROCESSES,
        }
        return [*ENTER, json.dumps(order)], self._namespaces

    def find_pid(self) -> int:
        return self._pid

    def clean(self, *, ended_by_itself: bool) -> None:
        for descriptor in (*self._namespaces, self._info, self._info_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._namespaces = []


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
