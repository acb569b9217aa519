"""Formats an exception of foreign code: one line for a table, and the traceback for the code's author."""

from __future__ import annotations

import traceback
from pathlib import Path

_ERROR_LENGTH = 300
_TRACE_LENGTH = 4000


def error_line(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, where the error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {_text_of(error)}".split())[:_ERROR_LENGTH]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def error_trace(error: BaseException) -> str:
    """The traceback below our own frame; only its end if it is long."""
    whole = error.__traceback__
    below = whole.tb_next if whole is not None else None
    return "".join(traceback.format_exception(type(error), error, below or whole)).strip()[-_TRACE_LENGTH:]


def _text_of(error: BaseException) -> str:
    """The exception's text. The broad `except` is needed: `__str__` of a foreign exception may raise as well."""
    try:
        return str(error)
    except BaseException as inner:
        return f"its text raises {type(inner).__name__}"
