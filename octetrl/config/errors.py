"""The two exceptions a user is meant to see.

A `UserError` is one line that says what was given, what is allowed and what to do. The command line prints it without a
traceback and exits with 2. A `RunFailed` says why a run could not go on that began with sound input: it diverged, or a
gate of its recipe closed. The exit code is 1. Everything else that is raised is our bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_LINE = 1_000  # letters of a message; what was given may be megabytes


class UserError(ValueError):
    """The user's input is wrong: recipe, override, path, model folder, device."""

    def __init__(self, text: str) -> None:
        """`text` quotes what was given, which may hold anything: control characters are written out, long lines cut,
        and only an indented line begins a new one (a list of problems)."""
        first, *problems = text.split("\n  ")
        super().__init__("\n  ".join(map(_shown, (first, *problems))))


def _shown(line: str) -> str:
    if not line.isprintable():
        line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in " ".join(line.split("\n")))
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


class RunFailed(RuntimeError):
    """The input is in order, and yet the run cannot go on."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest allowed word, or an empty string when none is close."""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""
