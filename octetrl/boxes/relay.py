"""Connects a port inside a box with the same port of this machine, so that a box without a network reaches the policy.

A helper process (enter.py) enters the box's network namespace, listens on 127.0.0.1 there and hands the socket over.
Connections are then accepted here. The box's image needs nothing for it, and nothing else of this machine is reachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

_SECONDS = 30.0
_CHUNK = 1 << 16
# Without the run's variables: a box sees those of its processes before they begin.
ENTER = ["env", "-i", sys.executable, "-I", "-S", str(Path(__file__).with_name("enter.py"))]


async def relay_from(listening: socket.socket, port: int) -> asyncio.Server:
    """Forward its connections to 127.0.0.1:`port`, until the result is closed."""
    tasks = set[asyncio.Task[None] | None]()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        tasks.add(task)  # asyncio drops its own reference with the connection, which may be reset before the end
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
            there_writer.close()
        except OSError:  # the policy's server has ended
            pass
        finally:
            writer.close()
            tasks.discard(task)

    return await asyncio.start_server(connect, sock=listening)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(OSError):  # either side may end at any time
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
    finally:
        writer.write_eof()


def listen_in(pid: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1:`port` in the network namespace of a process. Raises OSError if it can't be
    entered."""
    namespaces = open_namespaces(pid)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        order = json.dumps({"namespaces": namespaces, "port": port, "socket": theirs.fileno()})
        inherited = (namespaces, theirs.fileno())
        try:
            ended = subprocess.run(
                [*ENTER, order], pass_fds=inherited, capture_output=True, timeout=_SECONDS, check=False
            )
        finally:
            os.close(namespaces)
        if ended.returncode != 0:
            raise OSError(ended.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        _, descriptors, *_ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=descriptors[0])


def open_namespaces(pid: int) -> int:
    """A descriptor of the folder with the namespaces of a process, and never of another with its number."""
    return os.open(f"/proc/{pid}/ns", os.O_RDONLY | os.O_DIRECTORY)
