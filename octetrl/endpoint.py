"""Client for one OpenAI-compatible endpoint: posts a JSON body to a path, and returns a JSON object or an error.

A judge (judge.py) and a server that generates (backends/openai/) use it.

These failures are retried: no connection, no whole answer in time, and temporary statuses (408, 409, 429, 5xx except
501, by which a server says that it never does this).
`Retry-After` is respected up to a minute. The wait doubles each time and is random within its upper half, so that many
callers do not retry at once. A line on stderr says that a request waits, why and for how long. Any other status is not
retried, and a redirect is not followed: the key stays with the server it is for. The last failure is raised as an
EndpointError: one line without the key.

The HTTP client is httpx (extra `judge`) and not the openai package: only one kind of POST is needed, and
huggingface_hub installs httpx anyway. It limits each read by itself, and a server may send a byte a second. A deadline
for the whole request therefore needs its asynchronous client. One thread of the process runs all requests; the callers
wait for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol
from urllib.parse import urlsplit

from octetrl.system.errors import UserError
from octetrl.system.names import HOW, is_address

_MAY_PASS = (408, 409, 429)
_NOT_IMPLEMENTED = 501
_LONGEST_WAIT = 60.0  # seconds
_LONGEST_CONNECT = 20.0  # seconds, until a connection is open
_CONNECT_SHARE = 0.9  # of the time for a request, so that a server that is not reached is known as one
_LARGEST = 256 << 20  # bytes of an answer, decompressed
_LEAST_KEY = 8  # characters; a shorter key stands for none (EMPTY), and an answer may hold it by chance
_SHOWN = 300
_SILENT = 0.5  # seconds: a shorter wait needs no line
_PAUSE = 10.0  # seconds between two lines about waits, of all requests together
_JSON = {"Content-Type": "application/json"}


class EndpointSettings(Protocol):
    """The part of a recipe's section that a client reads: of `JudgeConfig` or `OpenaiConfig`."""

    @property
    def base_url(self) -> str: ...

    @property
    def api_key_variable(self) -> str | None: ...

    @property
    def timeout_seconds(self) -> float: ...

    @property
    def retries(self) -> int: ...

    @property
    def backoff_seconds(self) -> float: ...

    @property
    def concurrency(self) -> int: ...


class EndpointError(RuntimeError):
    """There is no answer; the text says why. `timed_out`: whether the last attempt exceeded its time. `status`: of the
    last answer, None if there was none or if it was 200. `reached`: whether the last attempt had an answer. `body`: of
    a status other than 200, whole, for words to look for; it may hold the key, so it is never shown. `wait`: the least
    seconds before another attempt; None: none would succeed."""

    def __init__(
        self,
        text: str,
        *,
        timed_out: bool = False,
        status: int | None = None,
        reached: bool = True,
        body: str = "",
        wait: float | None = None,
    ) -> None:
        line = " ".join(text.split())
        super().__init__("".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line))
        self.timed_out, self.status, self.reached, self.body, self.wait = timed_out, status, reached, body, wait


class Endpoint:
    """The endpoint at `config.base_url`. Raises UserError if httpx or the key's variable is missing. Thread-safe.

    section: the recipe's section, for messages.
    """

    def __init__(self, config: EndpointSettings, section: str = "environment.judge") -> None:
        for problem in lacking(config, section):
            raise UserError(problem)
        import httpx

        self._config, self._httpx = config, httpx
        if not is_address(config.base_url):
            raise UserError(f"{section}.base_url: this is not an address; {HOW}")
        self._key = _key_of(config.api_key_variable)
        self._echo = re.compile("".join(map(_forms_of, self._key))) if self._key else None
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        connect = min(_LONGEST_CONNECT, _CONNECT_SHARE * config.timeout_seconds)
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=connect), limits=limits)
        self._in_flight: set[Future[Any]] = set()
        self._turn = threading.BoundedSemaphore(config.concurrency)
        self._chance = random.Random()  # a separate generator, so that the run's generators do not advance
        self._closed = threading.Event()
        self._waits = Waits()

    def get(self, path: str) -> dict[str, Any]:
        """As `post`, without a body."""
        return self.post(path, None)

    def post(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Post `body` to `path` and return the answer. A path that begins with a slash is relative to the server, any
        other path to base_url. Raises EndpointError."""
        url, failed = self._url(path), EndpointError("")
        for retry in range(1, self._config.retries + 2):
            try:
                with self._turn:
                    return self._try(url, body)
            except EndpointError as error:
                failed = error
            if failed.wait is None or retry > self._config.retries:
                break
            backoff = self._config.backoff_seconds * 2 ** (retry - 1) * self._chance.uniform(0.5, 1.0)
            seconds = min(_LONGEST_WAIT, max(failed.wait, backoff))
            if not self._closed.is_set():  # a closed connection is an error too, and nobody's fault
                with self._waits.of(str(failed), seconds, retry, self._config):
                    self._closed.wait(seconds)
            if self._closed.is_set():
                raise EndpointError(f"{url}: not retried, because the run ends")
        raise failed

    def close(self) -> None:
        """Close the connections. Requests that wait for a retry fail."""
        self._closed.set()
        for request in list(self._in_flight):
            request.cancel()
        asyncio.run_coroutine_threadsafe(self._client.aclose(), _requests()).result()

    def _try(self, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send one request and return its answer. Raises EndpointError."""
        began, httpx = time.monotonic(), self._httpx
        try:
            response, text = self._exchange(url, body)
        except (TimeoutError, httpx.TimeoutException) as failure:
            said, reached = (
                f"{url}: no answer in {time.monotonic() - began:.1f} s",
                type(failure) is not httpx.ConnectTimeout,
            )
            raise EndpointError(said, timed_out=True, reached=reached, wait=0.0) from None
        except (httpx.DecodingError, httpx.InvalidURL, UnicodeError) as failure:  # UnicodeError: of the host's name
            raise self._error(url, failure, reached=isinstance(failure, httpx.DecodingError)) from None
        except (httpx.HTTPError, RuntimeError, CancelledError) as failure:  # the last two: it was closed meanwhile
            reached = isinstance(failure, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError)
            raise self._error(url, failure, reached=reached, wait=0.0) from None
        status = response.status_code
        if status == 200:
            try:
                return self._object(text)
            except ValueError as failure:
                raise EndpointError(self._masked(f"{url}: {failure}")) from None
        moved = f" to {self._shown(response.headers['location'])}" if response.has_redirect_location else ""
        said = f"{url}: status {status}{moved}: {self._shown(_reason(text))}"
        may_pass = status in _MAY_PASS or (status >= 500 and status != _NOT_IMPLEMENTED)
        wait = _seconds(response.headers.get("retry-after")) if may_pass else None
        raise EndpointError(said, status=status, body=text, wait=wait)

    def _exchange(self, url: str, body: dict[str, Any] | None) -> tuple[Any, str]:
        """Send one request and read its answer. Returns httpx's response and its text."""
        content = None if body is None else json.dumps(body)
        request = asyncio.run_coroutine_threadsafe(self._send(url, content), _requests())
        self._in_flight.add(request)
        try:
            if self._closed.is_set():  # after `close` cancelled the others
                request.cancel()
            response, text = request.result()
            return response, text.decode("utf-8-sig", errors="replace")
        finally:
            self._in_flight.discard(request)

    async def _send(self, url: str, content: str | None) -> tuple[Any, bytes]:
        sent: dict[str, Any] = {} if content is None else {"content": content, "headers": _JSON}
        parts: list[bytes] = []
        size = 0
        async with asyncio.timeout(self._config.timeout_seconds):
            async with self._client.stream("GET" if content is None else "POST", url, **sent) as response:
                async for part in response.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > _LARGEST:
                        raise self._httpx.DecodingError(f"the answer has more than {_LARGEST >> 20} MiB")
        return response, b"".join(parts)

    def _object(self, text: str) -> dict[str, Any]:
        """The JSON object in `text`. Raises ValueError; a message never quotes an answer that holds the key."""
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"not JSON: {self._shown(text)!r}") from None
        if not isinstance(answer, dict):
            raise ValueError(f"not a JSON object: {self._shown(text)}")
        if answer.get("error") and not answer.get("choices"):  # as some proxies send it
            raise ValueError(f"status 200 with an error: {self._shown(_reason(text))}")
        if self._echoes(text) or any(map(self._echoes, _strings(answer))):
            raise ValueError(
                "the answer contains the key that was sent, so it is not used; the server must not echo it"
            )
        return answer

    def _url(self, path: str) -> str:
        if not path.startswith("/"):
            return f"{self._config.base_url.rstrip('/')}/{path}"
        server = urlsplit(self._config.base_url)
        return f"{server.scheme}://{server.netloc}{path}"

    def _error(self, url: str, failure: BaseException, *, reached: bool, wait: float | None = None) -> EndpointError:
        text = self._masked(f"{url}: {type(failure).__name__}: {failure}")
        return EndpointError(text, reached=reached, wait=wait)

    def _echoes(self, text: str) -> bool:
        """Whether it contains the key. Of a short one, which stands for none, this is not asked."""
        return self._echo is not None and len(self._key or "") >= _LEAST_KEY and self._echo.search(text) is not None

    def _masked(self, text: str) -> str:
        return self._echo.sub("***", text) if self._echo is not None else text

    def _shown(self, text: str) -> str:
        """The beginning of a server's text. The key is masked before it is cut, so that no part of it stays."""
        masked = " ".join(self._masked(text).split())
        return masked if len(masked) <= _SHOWN else f"{masked[:_SHOWN]}..."


@cache
def _begun() -> asyncio.AbstractEventLoop:
    """A loop that a thread runs from now on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


_begins = threading.Lock()  # `cache` lets callers that come together begin several loops, and a client works in one


def _requests() -> asyncio.AbstractEventLoop:
    """The loop of the process's requests."""
    with _begins:
        return _begun()


def _forked() -> None:
    """A forked process has no such thread."""
    _begun.cache_clear()
    _begins.release()


os.register_at_fork(before=_begins.acquire, after_in_parent=_begins.release, after_in_child=_forked)


class Waits:
    """Says on stderr that requests wait for a retry. Many wait at once, so lines are rare. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0  # requests that wait now
        self._said = -_PAUSE

    @contextmanager
    def of(self, why: str, seconds: float, retry: int, config: EndpointSettings) -> Iterator[None]:
        """Within, a request waits `seconds` for the retry of this number."""
        with self._lock:
            self._count += 1
            now, others = time.monotonic(), self._count - 1
            is_due = seconds >= _SILENT and now - self._said >= _PAUSE
            self._said = now if is_due else self._said
        if is_due:
            line = f"octetrl: {why}; retry {retry} of {config.retries} in {seconds:.1f} s"
            line += f"; {others} more request{'s' * (others != 1)} wait too" if others else ""
            print(line, file=sys.stderr, flush=True)
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1


def _reason(text: str) -> str:
    """The message in the body of an error in OpenAI's form; of any other the whole body."""
    try:
        found = json.loads(text)["error"]["message"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return text
    return found if isinstance(found, str) and found.strip() else text


def _forms_of(letter: str) -> str:
    """A pattern of a printable ASCII character: as it is, and as URLs and JSON escape it."""
    number = f"{ord(letter):02x}"
    return rf"(?:\\?{re.escape(letter)}|(?i:%{number}|\\u00{number}))"


def _strings(answer: dict[str, Any]) -> Iterator[str]:
    """All strings and keys in a JSON object, of any depth."""
    left: list[Any] = [answer]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            yield from one
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def lacking(config: EndpointSettings, section: str) -> Iterator[str]:
    """What this machine lacks to ask the endpoint, a line each. section: the recipe's, for messages."""
    if find_spec("httpx") is None:
        yield f"{section}: needs httpx, which is not installed; pip install 'octetrl[judge]'"
    variable, key = config.api_key_variable, _key_of(config.api_key_variable)
    if variable is not None and not key:
        yield (
            f"{section}.api_key_variable: the environment variable {variable} is not set;"
            f" export {variable}=..., or set the field to null for an endpoint without a key"
        )
    elif key and not (key.isascii() and key.isprintable()):
        yield f"{section}.api_key_variable: {variable} holds characters that no header takes; set it again"


def _key_of(variable: str | None) -> str | None:
    return None if variable is None else os.environ.get(variable, "").strip()


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after or 0.0))
    except ValueError:  # a date
        return 0.0
