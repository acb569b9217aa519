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
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_SECONDS = 30.0
_CHUNK = 1 << 16
ENTER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("enter.py"))]


class Relay:
    """Forwards 127.0.0.1:`port` inside the namespaces to 127.0.0.1:`port` here, until `close`.

    namespaces: descriptors of the box's user and network namespaces. Raises OSError if they can't be entered."""

    def __init__(self, namespaces: Sequence[int], port: int) -> None:
        self._port, self._tasks = port, set[asyncio.Task[None] | None]()
        listening = _listening_there(namespaces, port)
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._connect, sock=listening), _loop()
        ).result(_SECONDS)

    def close(self) -> None:
        _loop().call_soon_threadsafe(self._server.close)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)  # asyncio drops its own reference with the connection, which may be reset before the end
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
            there_writer.close()
        except OSError:  # the policy's server has ended
            pass
        finally:
            writer.close()
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(OSError):  # either side may end at any time
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
    finally:
        writer.write_eof()


def _listening_there(namespaces: Sequence[int], port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        order = json.dumps({"namespaces": list(namespaces), "port": port, "socket": theirs.fileno()})
        ended = subprocess.run(
            [*ENTER, order],
            pass_fds=[*namespaces, theirs.fileno()],
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
        if ended.returncode != 0:
            raise OSError(ended.stderr.decode(errors="replace").strip().rpartition("\n")[2])
        _, descriptors, *_ = socket.recv_fds(ours, 1, 1)
        return socket.socket(fileno=descriptors[0])


def open_namespaces(pid: int, names: Sequence[str]) -> list[int]:
    """Descriptors, which keep naming these namespaces when the process has ended. Raises OSError."""
    opened: list[int] = []
    try:
        for name in names:
            opened.append(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    return opened


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all relays, in a thread of its own: boxes outlive the loops of the functions that use them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="boxes", daemon=True).start()
    return loop
