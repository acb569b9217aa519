"""The HTTP application: paths, the API key, the size limit of bodies, and errors in OpenAI's form.

    POST /v1/completions  /v1/chat/completions  /v1/responses  /v1/messages[/count_tokens]  /tokenize  /detokenize
    GET  /v1/models  /v1/models/NAME  /health  /metrics  /version

/health and /metrics need no key. The status of /health is 200 while requests are served, and 503 while the server
drains. After the engine failed it is 500, until a completion has succeeded again.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octetrl.server.endpoints import (
    CLIENT_CLOSED_REQUEST,
    Served,
    chat,
    completions,
    count_tokens,
    detokenize,
    messages,
    responses,
    tokenize,
)
from octetrl.server.errors import ApiError
from octetrl.server.messages import MessagesError

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


DISCARDED = 8  # up to this multiple of the limit, a too large body is read so that the client receives the error

Answers = Callable[[Request, bytes, Served], Awaitable[Response]]


def make_app(
    served: Served,
    *,
    api_key: str | None,
    max_body_bytes: int,
    origins: Sequence[str] = (),
    access_log: bool = False,
) -> Starlette:
    """Create the application. `origins`: web pages that may call it from a browser (CORS); "*": any.

    The engine's thread starts and stops with it. At the start the KV cache is allocated."""
    model = _card(served)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        served.intake.start()
        try:
            yield
        finally:
            served.intake.engine.stop()

    def generates(answers: Answers) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            _check_key(request, api_key)
            body = await read_body(request, max_body_bytes)
            return await answers(request, body, served)

        return _measured(endpoint, served)

    async def models(request: Request) -> Response:
        _check_key(request, api_key)
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != served.name:
            raise ApiError(404, f"there is no model {name!r}; this server has {served.name!r}", code="model_not_found")
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        return _health(served)

    async def metrics(request: Request) -> Response:
        return Response(served.meters.text(), media_type="text/plain; version=0.0.4")

    return Starlette(
        middleware=_middleware(origins, access_log),
        routes=[
            Route("/tokenize", generates(tokenize), methods=["POST"]),
            Route("/detokenize", generates(detokenize), methods=["POST"]),
            Route("/version", _version),
            Route("/v1/completions", generates(completions), methods=["POST"]),
            Route("/v1/chat/completions", generates(chat), methods=["POST"]),
            Route("/v1/responses", generates(responses), methods=["POST"]),
            Route("/v1/messages", generates(messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", generates(count_tokens), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers=ERROR_HANDLERS,
        lifespan=lifespan,
    )


def _card(served: Served) -> dict[str, Any]:
    """The model's entry in /v1/models."""
    return {
        "id": served.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "octetrl",
        "max_model_len": served.context_length,
    }


def _middleware(origins: Sequence[str], access_log: bool) -> list[Middleware]:
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return [*([Middleware(AccessLog)] if access_log else []), *([cors] if origins else [])]


async def _version(request: Request) -> Response:
    try:
        return JSONResponse({"version": version("octetrl")})
    except PackageNotFoundError:  # run from a checkout
        return JSONResponse({"version": "unknown"})


def _measured(
    endpoint: Callable[[Request], Awaitable[Response]], served: Served
) -> Callable[[Request], Awaitable[Response]]:
    """Count each response by path and status. A stream counts with the status at its start."""

    async def counted(request: Request) -> Response:
        status = 500
        try:
            response = await endpoint(request)
            status = response.status_code
        except ApiError as error:
            status = error.status
            raise
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
            status = CLIENT_CLOSED_REQUEST
        finally:
            served.meters.responses.labels(request.url.path, str(status)).inc()
        return response

    return counted


def _check_key(request: Request, api_key: str | None) -> None:
    if api_key is None:
        return
    if not secrets.compare_digest(key_of(request).encode(), api_key.encode()):
        raise ApiError(401, "the API key is missing or wrong; send 'Authorization: Bearer KEY'", code="invalid_api_key")


def key_of(request: Request) -> str:
    """The key that a client of OpenAI or Anthropic sends; empty: none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        elif size > DISCARDED * max_bytes:
            break
    if size > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes; send less", code="body_too_large")
    return b"".join(parts)


def _health(served: Served) -> Response:
    intake, error = served.intake, served.intake.engine.error
    if intake.draining:
        return JSONResponse({"status": "draining"}, 503)
    if not intake.engine.is_alive:
        return JSONResponse({"status": "failed", "error": "the engine's thread has ended"}, 500)
    if error is not None:
        return JSONResponse({"status": "failed", "error": error}, 500)
    return JSONResponse({"status": "ok", "model": served.name})


def _error_response(request: Request, error: ApiError) -> Response:
    """The error in the form of the request's API."""
    if "/v1/messages" in request.url.path:
        error = MessagesError(error)
    headers: dict[str, str] = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status == 413:
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error.body, error.status, headers=headers)


async def _api_error(request: Request, error: Any) -> Response:
    return _error_response(request, error)


async def _http_error(request: Request, error: Any) -> Response:
    """Respond to an unknown path or method."""
    what = f"{request.method} {request.url.path}"
    response = _error_response(request, ApiError(error.status_code, f"{json.dumps(what)}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    failed = ApiError(500, "the server failed to answer; its log says why", code="internal_error")
    return _error_response(request, failed)


ERROR_HANDLERS: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error}
