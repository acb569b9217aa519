"""Runs in namespaces that another process made: a command, or a socket that listens there. Started by its path.

    python -I -S enter.py ORDER      ORDER: JSON with `namespaces` (descriptors, those of users and processes first) and
                                     either `command`, `env`, `cwd`, `memory_bytes`, `processes`, or `port` and
                                     `socket` (where to send it)

The standard library alone, so that it starts within 25 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import socket
import struct
import sys
from typing import Any

_NO_NEW_PRIVILEGES, _BOUNDING_DROP, _AMBIENT, _CLEAR_ALL = 38, 24, 47, 4
_CAPABILITIES, _CAPSET_VERSION = 64, 0x20080522
_CANNOT_RUN = 126
_libc = ctypes.CDLL(None, use_errno=True)


def main(order: dict[str, Any]) -> None:
    namespaces = order["namespaces"]
    if "port" in order:
        _enter(namespaces)
        _listen(order["port"], order["socket"])
        return
    _enter(namespaces[:2])
    child = os.fork()  # the first process inside the process namespace
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    _limit_processes(order["processes"])
    _enter(namespaces[2:])
    command = order["command"]
    try:
        os.chdir(order["cwd"])
        resource.setrlimit(resource.RLIMIT_DATA, (order["memory_bytes"],) * 2)
        _drop_capabilities()
        os.execvpe(command[0], command, order["env"])
    except (OSError, ValueError) as error:  # also a zero byte in a word
        os.write(2, f"{command[0]}: {error}\n".encode())
    os._exit(_CANNOT_RUN)


def _enter(descriptors: list[int]) -> None:
    own = {os.stat(f"/proc/self/ns/{name}").st_ino for name in os.listdir("/proc/self/ns")}
    for descriptor in descriptors:
        if os.fstat(descriptor).st_ino not in own:  # its own can't be entered again, and may not be
            _check(_libc.setns(descriptor, 0), "setns")
        os.close(descriptor)


def _limit_processes(most: int) -> None:
    """Of the box, before its mounts are entered, which allow no writing here. The file has the limit of the writer's
    process namespace from Linux 6.14 on, and before that the machine's. Root's processes have no other limit."""
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 14):
        with contextlib.suppress(OSError), open("/proc/sys/kernel/pid_max", "w") as limit:
            limit.write(str(most))


def _listen(port: int, descriptor: int) -> None:
    with socket.socket() as listening, socket.socket(fileno=descriptor) as receiver:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
        socket.send_fds(receiver, [b"1"], [listening.fileno()])


def _drop_capabilities() -> None:
    """Those that entering a user namespace gives, for good: with them a command could change the box's mounts."""
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))), "prctl")
    for number in range(_CAPABILITIES):
        _libc.prctl(_BOUNDING_DROP, *map(ctypes.c_ulong, (number, 0, 0, 0)))  # EINVAL: the kernel has no such one
    _check(_libc.prctl(_AMBIENT, *map(ctypes.c_ulong, (_CLEAR_ALL, 0, 0, 0))), "prctl")
    _check(_libc.capset(struct.pack("=Ii", _CAPSET_VERSION, 0), bytes(24)), "capset")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
