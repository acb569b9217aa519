"""uvicorn with signals that drain the server, and with connections that clients can't use up.

**Connections** stay below the limit on open files. One waits for its client until a whole request header has come,
while a request's body is sent, and while the client does not read its answer. A client has QUIET_SECONDS for a header,
as long between two parts of a body, and ten times as long between two reads. uvicorn itself ends connections that stay
open after an answer.

A new connection always gets a place: if there is none, the one that has waited longest is ended. Requests that are
being answered keep theirs, and their number is limited so that places for others remain (`Intake.most_answers`).

asyncio accepts all connections that wait, up to the backlog, before it handles one, and logs a traceback for each that
finds no descriptor. Here it accepts a few at a time, and descriptors for these stay in reserve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from octetrl.server.intake import Intake
from octetrl.system.errors import UserError

AFTER_DRAIN_SECONDS = 5  # for what was told to leave
QUIET_SECONDS = 30.0
_SLOWER_READS = 10  # a program may think about one part of a stream before it reads the next
ACCEPTED_AT_ONCE = 16
_BACKLOG = 2048  # connections that the kernel keeps until they are accepted
FOR_OTHERS = 16  # places that requests for completions never take: /health, /metrics, connections between requests
_IDLE = 1024  # places beyond the largest number of requests, where the limit on open files allows
_RESERVED = 6 * ACCEPTED_AT_ONCE  # accepted and not counted yet, or ended and not closed yet; files that are opened
_FEWEST = 2 * FOR_OTHERS
_LOG_SECONDS = 60.0

log = logging.getLogger("uvicorn.error")


def connection_limit(requests: int) -> int:
    """Number of connections that fit, for a server that answers up to `requests` at once. Raises this process's limit
    on open files if it may and must. UserError if too few fit."""
    wanted = requests + _IDLE
    used = len(os.listdir("/dev/fd")) + _RESERVED
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < used + wanted:
        files = used + wanted if most_files == resource.RLIM_INFINITY else min(used + wanted, most_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most_files))
    room = wanted if files == resource.RLIM_INFINITY else min(wanted, files - used)
    if room < _FEWEST:
        raise UserError(f"ulimit -n: {files} open files leave too few for connections; allow at least {used + _FEWEST}")
    return room


class Connection(H11Protocol):
    """uvicorn's connection, which knows since when it waits for its client. A server derives a class with its `most`
    connections, which share the set `connections`."""

    most: int
    quiet_seconds = QUIET_SECONDS
    _since = _heard = 0.0

    @property
    def is_unread(self) -> bool:
        """Whether the client has to read before all that was written is sent; that may be after uvicorn's close."""
        return self.transport.get_write_buffer_size() > 0

    @property
    def is_open(self) -> bool:
        return self.is_unread or not self.transport.is_closing()

    @property
    def waits_since(self) -> float | None:
        """A time of the monotonic clock; None: the server must act, or the connection has ended."""
        if not self.is_open:
            return None
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            return self._since
        return self._heard if self.cycle.more_body or self.flow.write_paused else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self._heard = time.monotonic()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        super().data_received(data)

    def pause_writing(self) -> None:
        self._heard = time.monotonic()
        super().pause_writing()

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()

    def _make_room(self) -> None:
        others = [connection for connection in self.connections if isinstance(connection, Connection)]
        if sum(connection.is_open for connection in others) > self.most:
            log.warning("%d connections are open, as many as fit; those that wait longest are closed", self.most)
            waiting = [
                (since, id(connection), connection)
                for connection in others
                if (since := connection.waits_since) is not None
            ]
            min(waiting)[2].transport.abort()  # the new one waits too


def close_quiet(connections: Iterable[object]) -> None:
    """End those whose client has said nothing for too long."""
    now = time.monotonic()
    for one in list(connections):
        if isinstance(one, Connection) and (since := one.waits_since) is not None:
            seconds = _SLOWER_READS * one.quiet_seconds if one.is_unread else one.quiet_seconds
            if now - since > seconds:
                one.transport.abort()


class OncePerMinute(logging.Filter):
    """Lets a warning pass, and a failure to accept a connection, if it has not passed in the last minute: clients
    without a key can cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line = record.msg.partition("\n")[0] if isinstance(record.msg, str) else ""
        if record.levelno > logging.WARNING and not line.startswith("socket.accept()"):
            return True
        now = time.monotonic()
        if now - self._passed.get(line, -_LOG_SECONDS) < _LOG_SECONDS:
            return False
        self._passed[line] = now
        return True


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """A second signal, or the end of a run, cancels the last tasks of uvicorn, which logs the tracebacks as errors."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and not record.getMessage().rstrip().endswith("CancelledError")


class Server(uvicorn.Server):
    """A server for `app` on the socket `listening`. The first signal drains it for `drain_seconds`, the second ends it
    at once; uvicorn's own handlers would close connections without an error message. `ready` is called when it serves.
    Raises UserError if the limit on open files is too low."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        intake: Intake,
        listening: socket.socket,
        drain_seconds: float,
        ready: Callable[[], None],
    ) -> None:
        class Bounded(Connection):
            most = connection_limit(intake.capacity)

        super().__init__(
            uvicorn.Config(
                app,
                http=Bounded,
                ws="none",
                backlog=ACCEPTED_AT_ONCE,
                lifespan="on",
                access_log=False,
                log_level="warning",
                server_header=False,
                timeout_graceful_shutdown=AFTER_DRAIN_SECONDS,
            )
        )
        self._intake, self._listening, self._drain_seconds, self._ready = intake, listening, drain_seconds, ready
        self.interrupted = False  # by Ctrl-C
        self._ending: asyncio.Task[None] | None = None
        intake.most_answers = Bounded.most - FOR_OTHERS
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)
        for name in ("uvicorn.error", "asyncio"):
            logging.getLogger(name).addFilter(OncePerMinute())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.end, number)
        yield

    def end(self, number: int) -> None:
        self.interrupted |= number == signal.SIGINT
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._intake.tell_all_to_leave()
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._intake.drain(self._drain_seconds)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._listening.listen(_BACKLOG)  # uvicorn has set it to how many it accepts at once
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            close_quiet(self.server_state.connections)
        return await super().on_tick(counter)
