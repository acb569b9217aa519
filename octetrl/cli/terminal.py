"""Lines on a terminal: a section with a name and a text on each line, and one while PyTorch is imported.

On a terminal a text that is too long for it continues below its own beginning. A pipe gets it on one line.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from octetrl.system.process import uncollected

LEAST_WIDTH = 30  # of a text; a narrower terminal breaks it itself
LOADING = "  loading PyTorch"


def terminal_columns() -> int | None:
    """The width of the terminal. None: stdout is a file or a pipe, whose lines are not broken."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_lines(title: str, lines: Iterator[tuple[str, str]]) -> None:
    """Print a section, or nothing if it has no lines."""
    rows = list(lines)  # all of them first: a section is shown whole or not at all
    width = max(20, *(len(name) + 2 for name, _ in rows)) if rows else 20
    columns = terminal_columns()
    room = None if columns is None else columns - width - 2
    if rows:
        typer.echo(title)
    for name, value in rows:
        first, *others = wrapped(value, room)
        typer.echo(f"  {name:<{width}}{first}")
        for other in others:
            typer.echo(f"  {'':<{width}}{other}")


def wrapped(text: str, room: int | None) -> list[str]:
    """The lines of a text. `room`: columns; None: as many as it needs."""
    if room is None or room < LEAST_WIDTH or len(text) <= room:
        return [text]
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)


@contextmanager
def loading_pytorch() -> Iterator[None]:
    """Within, a terminal shows the line; afterwards nothing of it is left. A pipe gets nothing."""
    shows = "torch" not in sys.modules and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if shows:
        print(LOADING, end="\r", file=sys.stderr, flush=True)
    try:
        with uncollected():
            yield
    finally:
        if shows:
            print("\x1b[2K", end="\r", file=sys.stderr, flush=True)
