"""Errors for clients: a status and OpenAI's error body, so that OpenAI's client raises the right exception.

400 invalid_request_error  the request is wrong or not supported            413  the body is too large
401 authentication_error   the key is missing or wrong                      404  the model or path does not exist
429 rate_limit_error       the queue is full                                503  the server is draining
500 server_error           the engine failed
"""

from __future__ import annotations

from typing import Any

_NAMES = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens", "num_top": "top_logprobs"}
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """An error that ends a request with `status`. `param` is the wrong field, `code` identifies the error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Create the error for a field with an unsupported value."""
    return ApiError(400, message, code=code, param=param)


def refused(message: str) -> ApiError:
    """Create the error for a request that the engine refuses, with the fields' names in this API."""
    text = message.partition("': ")[2] if message.startswith("request '") else message
    for of_engine, name in _NAMES.items():
        text = text.replace(of_engine, name)
    field, is_field, _ = text.partition(" is ")
    return wrong(field if is_field and field.isidentifier() else None, text)


def engine_failed(message: str) -> ApiError:
    return ApiError(500, f"the engine failed: {message}", code="engine_error")


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down; send the request to another server", code="draining")
