"""One line for each answered request: client, method, path, status, seconds until the last byte.

127.0.0.1:51812 "POST /v1/chat/completions" 200 0.482 s
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = logging.getLogger("octetrl.access")


class AccessLog:
    """ASGI middleware that logs requests at level INFO."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            host, port = scope.get("client") or ("-", 0)
            what = f"{scope['method']} {scope['path']}"
            log.info("%s:%d %r %d %.3f s", host, port, what, status, time.perf_counter() - begun)


def show_access_log() -> None:
    """Writes the lines to standard error."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
