"""Connections have a limit, and those whose client says nothing have a time."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest

from octetrl.system.errors import UserError
from tests.required import missing

try:
    import uvicorn

    from octetrl.server import http_server
    from octetrl.server.http_server import Connection, OncePerMinute, close_quiet, connection_limit, is_no_cancellation
except ModuleNotFoundError as error:
    missing("serve", str(error), whole_module=True)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEAD = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n\r\n"


class App:
    """Reads a body, waits until it is let go and answers."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.bodies: list[bytes] = []
        self.connections: set[object] = set()
        self.answer = [b"ok"]

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        body = b""
        while len(body) < 4:
            part = await receive()
            if part["type"] == "http.disconnect":
                return
            body += part["body"]
        self.bodies.append(body)
        await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for left, part in reversed(list(enumerate(self.answer))):
            await send({"type": "http.response.body", "body": part, "more_body": left > 0})


def served(test: Callable[[App, Callable[[bytes], Awaitable[Streams]]], Awaitable[None]], quiet: float) -> None:
    """Run `test` with an app and a function that connects and sends. quiet: seconds that a client may say nothing."""

    class Few(Connection):
        most = 3
        quiet_seconds = quiet

    async def run() -> None:
        app = App()
        config = uvicorn.Config(app, http=Few, ws="none", lifespan="off", log_level="error", timeout_keep_alive=0)
        config.load()
        state = uvicorn.server.ServerState()
        app.connections = state.connections  # type: ignore[assignment]
        server = await asyncio.get_running_loop().create_server(
            lambda: Few(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )

        async def connect(text: bytes) -> Streams:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(text)
            await until(lambda: any(one.client == writer.get_extra_info("sockname") for one in state.connections))
            return reader, writer

        async def tick() -> None:
            while True:
                close_quiet(state.connections)
                await asyncio.sleep(0.02)

        ticking = asyncio.create_task(tick())
        await test(app, connect)
        ticking.cancel()
        server.close()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


async def is_ended(one: Streams) -> bool:
    try:
        return await one[0].read(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("text", [b"", b"POST / HTT", HEAD, HEAD + b"ab"], ids=["silent", "head", "no body", "body"])
def test_a_client_that_says_nothing_more_is_ended(text: bytes) -> None:
    async def test(app: App, connect: Callable[[bytes], Awaitable[Streams]]) -> None:
        async with asyncio.timeout(60):
            assert await is_ended(await connect(text))
        assert app.bodies == []

    served(test, 0.3)


@pytest.mark.parametrize("parts", [1, 1024], ids=["one part", "stream"])
def test_a_client_that_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    monkeypatch.setattr(http_server, "_SLOWER_READS", 1)

    async def test(app: App, connect: Callable[[bytes], Awaitable[Streams]]) -> None:
        app.answer = [bytes((64 << 20) // parts)] * parts  # more than all buffers hold
        app.let_go.set()
        reader, _ = await connect(HEAD + b"body")
        await reader.readuntil(b"\r\n\r\n")
        await until(lambda: not app.connections)

    served(test, 1.0)


def test_an_answer_that_takes_long_is_waited_for() -> None:
    async def test(app: App, connect: Callable[[bytes], Awaitable[Streams]]) -> None:
        reader, _ = await connect(HEAD + b"body")
        idle = await connect(b"")
        async with asyncio.timeout(60):
            assert await is_ended(idle)
        app.let_go.set()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")

    served(test, 1.0)


def test_who_has_waited_longest_makes_room_and_an_answer_does_not() -> None:
    async def test(app: App, connect: Callable[[bytes], Awaitable[Streams]]) -> None:
        answered = await connect(HEAD + b"body")
        await until(lambda: app.bodies == [b"body"])
        first, second = await connect(b"POST"), await connect(b"")
        third = await connect(HEAD + b"more")
        assert await is_ended(first) and not second[0].at_eof()
        await until(lambda: app.bodies == [b"body", b"more"])
        fourth = await connect(HEAD + b"last")
        assert await is_ended(second)
        await until(lambda: len(app.bodies) == 3)
        place = answered[1].get_extra_info("peername")
        assert await is_ended(await asyncio.open_connection(*place))  # all others are being answered
        app.let_go.set()
        for reader, _ in (answered, third, fourth):
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK\r\n")

    served(test, 600.0)


def test_what_the_end_cancels_is_not_logged() -> None:
    for error, is_logged in ((asyncio.CancelledError(), False), (OSError(), True)):
        record = logging.LogRecord("uvicorn.error", 40, "", 1, "Exception\n", None, (type(error), error, None))
        assert is_no_cancellation(record) == is_logged


def test_connections_leave_room_for_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised as far as it may be."""
    limits = [(256, 256)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert 32 <= connection_limit(512) < 160
    limits.append((256, 4096))
    assert connection_limit(512) == 512 + 1024
    assert 1536 < limits[-1][0] < 4096 == limits[-1][1]
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_limit(4) == 4 + 1024
    limits.append((80, 80))
    with pytest.raises(UserError, match="ulimit -n: 80 open files"):
        connection_limit(4)


def test_what_clients_cause_is_logged_once_a_minute() -> None:
    once = OncePerMinute()

    def passes(level: int, text: str) -> bool:
        return bool(once.filter(logging.LogRecord("x", level, "", 0, text, None, None)))

    accept = "socket.accept() out of system resource\nsocket: <fd=7>"
    for level, text in ((logging.WARNING, "Invalid HTTP request received."), (logging.ERROR, accept)):
        assert [passes(level, text) for _ in range(3)] == [True, False, False]
    assert [passes(logging.ERROR, "Exception in ASGI application\n") for _ in range(2)] == [True, True]
