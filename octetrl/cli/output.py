"""What verbs write: lines on a terminal, and files.

On a terminal a text that is too long for it continues below its own beginning. A pipe gets it on one line. A file is
written last, after long work. So it is tested before, and a failure is one line.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from octetrl.system.errors import UserError
from octetrl.system.process import uncollected
from octetrl.system.text import escaped
from octetrl.telemetry.rollouts import Span

PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
PICTURES |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
PICTURES |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # turn text around
LINE_END = "\u23ce"
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


def clean(text: str) -> str:
    """The text without control characters."""
    return escaped(text).translate(PICTURES)


def print_spans(spans: Iterable[Span], word: str = "trained") -> None:
    """Print a token sequence, with the parts that are trained on. word: what they are called."""
    for span in spans:
        number = "" if span.tokens is None else f"{span.tokens:,}"
        lines = clean(span.text).replace("\n", f"{LINE_END}\n").split("\n")
        typer.echo(f"  {word if span.is_trained else 'context'}{number:>7}  {lines[0]}")
        for line in lines[1 : None if lines[-1] else -1]:
            typer.echo(f"  {'':16}{line}")


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


def refuse_file(option: str, path: Path, example: str) -> None:
    """Raise UserError if no file can be written at `path`. Leaves what is there as it is.

    A folder of /proc or /sys says that it can be written in and then takes no file, so a missing file is created and
    removed. `example`: a name that the message gives.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"{option}: '{path}' is not a file in a folder that exists; give one, such as {example}")
    with writes(option, path):
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            real = os.path.realpath(path)  # of a link whose target is missing
            os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            os.unlink(real)


def refuse_unmakeable(option: str, path: Path) -> None:
    """Raise UserError if `path` is neither a folder that can be written in, nor one that can be created."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with writes(option, missing[-1] if missing else path, "folder"):
        if missing:
            missing[-1].mkdir()
            missing[-1].rmdir()
        elif not path.is_dir():
            raise NotADirectoryError(None, "Not a directory")
        elif not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(None, "Permission denied")


@contextmanager
def writes(option: str, path: Path, kind: str = "file") -> Iterator[None]:
    """Convert any OSError of writing to `path` to a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option}: cannot write '{path}' ({error.strerror or error}); give another {kind}") from error


@contextmanager
def whole_file(option: str, path: Path) -> Iterator[Path]:
    """Where to write what replaces the file at `path`. If that fails, as on a full disk, `path` stays as it is.

    What is not a file (/dev/stdout), or lies in a folder that takes no new file, is written in place."""
    real = Path(os.path.realpath(path))
    in_place = (real.exists() and not real.is_file()) or not os.access(real.parent, os.W_OK | os.X_OK)
    aside = real if in_place else real.with_name(f".{os.getpid()}.partial")
    with writes(option, path):
        try:
            yield aside
            if not in_place:
                aside.replace(real)
        except BaseException:
            if not in_place:
                aside.unlink(missing_ok=True)
            raise
