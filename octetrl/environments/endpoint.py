"""Client for one OpenAI-compatible endpoint: posts a JSON body to a path, and returns a JSON object or an error.

A judge (judge.py) and a server that generates (backends/openai/) use it.

These failures are retried: no connection, no answer in time, and temporary statuses (408, 409, 429, 5xx). `Retry-After`
is respected up to a minute. The wait doubles each time and is random within its upper half, so that many callers do not
retry at once. Any other status is not retried. The last failure is raised as an EndpointError: one line without the
key.

The HTTP client is httpx (extra `judge`) and not the openai package: only one kind of POST is needed, and
huggingface_hub installs httpx anyway. httpx's client is thread-safe, and so is this class.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from typing import Any, Protocol
from urllib.parse import urlsplit

from octetrl.config.errors import UserError

_MAY_PASS = (408, 409, 429)
_LONGEST_WAIT = 60.0  # seconds
_LONGEST_CONNECT = 20.0  # seconds, until a connection is open
_SHOWN = 200
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
    last answer, None if there was none or if it was 200. `reached`: whether the last attempt had an answer."""

    def __init__(self, text: str, *, timed_out: bool = False, status: int | None = None, reached: bool = True) -> None:
        super().__init__(" ".join(text.split()))
        self.timed_out, self.status, self.reached = timed_out, status, reached


class Endpoint:
    """The endpoint at `config.base_url`. Raises UserError if httpx or the key's variable is missing. Thread-safe.

    section: the recipe's section, for messages.
    """

    def __init__(self, config: EndpointSettings, section: str = "environment.judge") -> None:
        try:
            import httpx
        except ImportError:
            raise UserError(f"{section}: needs httpx, which is not installed; pip install 'octetrl[judge]'") from None
        self._config, self._httpx = config, httpx
        self._key = _key_of(config.api_key_variable, section)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
        timeout = httpx.Timeout(config.timeout_seconds, connect=min(_LONGEST_CONNECT, config.timeout_seconds))
        self._client = httpx.Client(headers=headers, timeout=timeout, limits=limits)
        self._turn = threading.BoundedSemaphore(config.concurrency)
        self._chance = random.Random()  # a separate generator, so that the run's generators do not advance
        self._closed = threading.Event()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post `body` to `path` and return the answer. A path that begins with a slash is relative to the server, any
        other path to base_url. Raises EndpointError."""
        return self._ask(path, body)

    def get(self, path: str) -> dict[str, Any]:
        """As `post`, without a body."""
        return self._ask(path, None)

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        url = self._url(path)
        for tries in range(self._config.retries + 1):
            with self._turn:
                answer, error, wait = self._try(url, body)
            if answer is not None:
                return answer
            assert error is not None
            if wait is None or tries == self._config.retries:
                raise error
            backoff = self._config.backoff_seconds * 2**tries * self._chance.uniform(0.5, 1.0)
            if self._closed.wait(min(_LONGEST_WAIT, max(wait, backoff))):
                raise EndpointError(f"{url}: not retried, because the run ends")
        raise AssertionError("unreachable: the last try raises")

    def close(self) -> None:
        """Close the connections. Requests that wait for a retry fail."""
        self._closed.set()
        self._client.close()

    def _try(
        self, url: str, body: dict[str, Any] | None
    ) -> tuple[dict[str, Any] | None, EndpointError | None, float | None]:
        """Send one request. Returns (answer, None, None), or (None, error, wait). `wait` is the shortest time in
        seconds before a retry; None: no retry."""
        began = time.monotonic()
        try:
            if body is None:
                response = self._client.get(url)
            else:
                response = self._client.post(url, content=json.dumps(body), headers=_JSON)
        except self._httpx.TimeoutException as failure:
            said = f"{url}: no answer in {time.monotonic() - began:.1f} s"
            reached = not isinstance(failure, self._httpx.ConnectTimeout)
            return None, EndpointError(said, timed_out=True, reached=reached), 0.0
        except (self._httpx.HTTPError, RuntimeError) as failure:  # RuntimeError: the client was closed meanwhile
            reached = isinstance(failure, self._httpx.RemoteProtocolError | self._httpx.ReadError)
            return None, self._error(f"{url}: {type(failure).__name__}: {failure}", reached=reached), 0.0
        if response.status_code != 200:
            said = f"{url}: status {response.status_code}: {response.text[:_SHOWN]}"
            error = self._error(said, status=response.status_code)
            may_pass = response.status_code in _MAY_PASS or response.status_code >= 500
            return None, error, _seconds(response.headers.get("retry-after")) if may_pass else None
        try:
            answer = response.json()
        except ValueError:
            return None, self._error(f"{url}: not JSON: {response.text[:_SHOWN]!r}"), None
        if not isinstance(answer, dict):
            return None, self._error(f"{url}: not a JSON object: {response.text[:_SHOWN]}"), None
        return answer, None, None

    def _url(self, path: str) -> str:
        if not path.startswith("/"):
            return f"{self._config.base_url.rstrip('/')}/{path}"
        server = urlsplit(self._config.base_url)
        return f"{server.scheme}://{server.netloc}{path}"

    def _error(self, text: str, *, status: int | None = None, reached: bool = True) -> EndpointError:
        shown = text.replace(self._key, "***") if self._key else text
        return EndpointError(shown, status=status, reached=reached)


def _key_of(variable: str | None, section: str) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"{section}.api_key_variable: the environment variable {variable} is not set;"
            f" export {variable}=..., or set the field to null for an endpoint without a key"
        )
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{section}.api_key_variable: {variable} holds characters that no header takes; set it again")
    return key


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after or 0.0))
    except ValueError:  # a date
        return 0.0
