"""The event loop of all boxes, in a thread of its own, and the processes whose streams it reads.

Boxes outlive the loops of the functions that use them, and code that blocks its own loop delays no box: commands are
read and their time limits kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar, cast

_END_SECONDS = 10.0  # for a process that was killed

_Result = TypeVar("_Result")


def start_on_loop(call: Coroutine[Any, Any, _Result]) -> Future[_Result]:
    return asyncio.run_coroutine_threadsafe(call, _loop())


async def on_loop(call: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `call` on the loop of boxes. If the awaiting task is cancelled, it is cancelled there."""
    return await asyncio.wrap_future(start_on_loop(call))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="boxes", daemon=True).start()
    return loop


class Kept:
    """The first and the last bytes of a stream. word: the word before the exit code, where the stream ends."""

    def __init__(self, most: int, word: str | None = None) -> None:
        self.data = bytearray()
        self.code: int | None = None
        self._most, self.left_out = most, 0
        self._pattern = None if word is None else re.compile(rb"\n%s (\d+)\n" % word.encode())

    def add(self, new: bytes) -> None:
        if self.code is not None:
            return
        start = max(0, len(self.data) - 64)
        self.data += new
        if self._pattern is not None and (found := self._pattern.search(self.data, start)):
            self.code = int(found[1])
            del self.data[found.start() :]
        more = max(0, len(self.data) - self._most)
        self.left_out += more
        del self.data[self._most // 2 : self._most // 2 + more]

    def text(self) -> str:
        middle = self._most // 2 if self.left_out else 0
        said = f"\n[{self.left_out:,} bytes left out]\n" if self.left_out else ""
        return self.data[:middle].decode("utf-8", "replace") + said + self.data[middle:].decode("utf-8", "replace")


class Process(asyncio.SubprocessProtocol):
    """A process of this machine, and what is kept of its streams. On the loop of boxes; see `start`."""

    def __init__(self, most: int, word: str | None) -> None:
        self.out, self.err = Kept(most), Kept(most, word)
        self.code: int | None = None  # its exit code, minus the signal that has ended it
        self.input: asyncio.WriteTransport
        self._transport: asyncio.SubprocessTransport
        self.open_streams = {1, 2}
        self._changed = asyncio.Event()

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        stdin: bytes | None,
        most: int,
        word: str | None = None,
        descriptors: Sequence[int] = (),
    ) -> Process:
        """stdin: what it reads; None: `input` stays open. most: bytes to keep of each stream. word: before the exit
        code in its errors. Raises OSError, and ValueError for a command that can't be."""
        loop, (theirs, ours) = asyncio.get_running_loop(), os.pipe()
        with os.fdopen(theirs), contextlib.ExitStack() as failed:
            pipe = failed.enter_context(os.fdopen(ours, "wb", 0))
            _, process = await loop.subprocess_exec(
                lambda: cls(most, word), *command, stdin=theirs, pass_fds=descriptors, start_new_session=True
            )
            failed.pop_all()
        process.input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)
        if stdin is not None:
            process.input.write(stdin)
            process.input.close()
        return process

    @property
    def pid(self) -> int:
        return self._transport.get_pid()

    @property
    def has_ended(self) -> bool:
        return self.code is not None and not self.open_streams

    async def within(self, seconds: float, holds: Callable[[], bool]) -> bool:
        """Wait until `holds`, which its streams and its end change. Returns False if the time is over before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        return holds()

    async def end(self) -> None:
        """Kill it, and read no further: what it has started in the box may hold its streams for longer."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # the transport's `kill` would take its exit code from asyncio
            await self.within(_END_SECONDS, lambda: self.code is not None)
        self._transport.close()
        if not self.input.is_closing():
            self.input.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        (self.out if fd == 1 else self.err).add(data)
        self._changed.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.open_streams.discard(fd)
        self._changed.set()

    def process_exited(self) -> None:
        self.code = self._transport.get_returncode()
        self._changed.set()
