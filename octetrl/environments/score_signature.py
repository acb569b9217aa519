"""What functions of an environment look like from outside: whether they can be called as they will be, and where they
are."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from octetrl.records import Task
from octetrl.system.errors import UserError


def check_signature(score: Any, what: str) -> None:
    """Raises UserError unless `score` is a plain function of (task, completion_text). what: its name in the message."""
    if inspect.iscoroutinefunction(score):
        raise UserError(
            f"{what} ({place_of(score)}) is async; write a plain function of (task, completion_text) that returns a"
            " number"
        )
    _check_call(score, what, (Task("", ""), ""), "task, completion_text", "take these two arguments")


def check_call_with_conversation(function: Any, what: str) -> None:
    """Raises UserError unless `function` can be called with a conversation alone. what: its name in the message."""
    _check_call(function, what, (None,), "conversation", "take this argument")


def _check_call(function: Any, what: str, arguments: tuple[Any, ...], names: str, remedy: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{what} ({place_of(function)}) takes {signature}, but is called with ({names}): {error}; {remedy}"
        ) from None


def place_of(score: Any) -> str:
    """Name, file and line of a function, method or callable object, such as `by_length, rewards.py:12`."""
    function = score if inspect.isroutine(score) or not callable(score) else type(score).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    name = getattr(score, "__qualname__", None) or type(score).__qualname__
    return name if code is None else f"{name}, {Path(code.co_filename).name}:{code.co_firstlineno}"
