"""Runs in namespaces that another process made: a command, or a socket that listens there. Started by its path.

    python -I -S enter.py ORDER      ORDER: JSON with `namespaces` (a descriptor of /proc/PID/ns) and either `command`,
                                     `env`, `cwd`, `memory_bytes`, `processes`, or `port` and `socket` (for the result)

It imports little, so that it starts within 25 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from octetrl.process.kernel import drop_capabilities, enter_namespaces

_CANNOT_RUN = 126


def main(order: dict[str, Any]) -> None:
    if "port" in order:
        enter_namespaces(order["namespaces"], "user", "net")
        _listen(order["port"], order["socket"])
        return
    enter_namespaces(order["namespaces"], "user", "pid")  # "user" first: it gives the right to enter the others
    child = os.fork()  # the first process inside the process namespace
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)
    _limit_processes(order["processes"])
    enter_namespaces(order["namespaces"], "mnt", "ipc", "uts", "net")
    os.close(order["namespaces"])
    command = order["command"]
    try:
        os.chdir(order["cwd"])
        resource.setrlimit(resource.RLIMIT_DATA, (order["memory_bytes"],) * 2)
        drop_capabilities()  # with them a command could change the box's mounts
        os.execvpe(command[0], command, order["env"])
    except (OSError, ValueError) as error:  # also a zero byte in a word
        os.write(2, f"{command[0]}: {error}\n".encode())
    os._exit(_CANNOT_RUN)


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


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
