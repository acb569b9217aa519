"""Formats what a foreign callable raised: one line for a table, and the traceback for its author."""

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
    """The traceback below our own frame; the end of it, where it is long."""
    whole = error.__traceback__
    below = whole.tb_next if whole is not None else None
    return "".join(traceback.format_exception(type(error), error, below or whole)).strip()[-_TRACE_LENGTH:]


def _text_of(error: BaseException) -> str:
    """A broad `except`: the text of a foreign exception is foreign code, and may raise as well."""
    try:
        return str(error)
    except BaseException as inner:
        return f"its text raises {type(inner).__name__}"
