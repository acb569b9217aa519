"""The exceptions that a user may see.

A `UserError` is one line that says what was given, what is allowed and what to do. The command line prints it without a
traceback and exits with code 2. A `RunFailed` says why a run with valid input could not continue: it diverged, or a
check that its recipe asks for failed. Its exit code is 1. `Terminated` is SIGTERM, where the process has something to
end first. Any other exception is a bug.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from octetrl.system.text import printable

MOST_NAMES = 2_000  # names of a folder that are compared with a name
TERMINATED = 128 + 15  # exit code: a shell's for SIGTERM
_ERROR_LENGTH, _TRACE_LENGTH = 300, 4000  # characters of a foreign exception
LONGEST_LINE = 1_000  # characters of a message's line; the quoted input may have megabytes


class UserError(ValueError):
    """The user's input is wrong: recipe, override, path, model folder, device."""

    def __init__(self, text: str) -> None:
        """Store `text` in a form that a terminal can show.

        It may quote any input, so control characters are escaped and long lines are cut. A line break stays only
        before an indented line, as in a list of problems."""
        first, *problems = text.split("\n  ")
        super().__init__("\n  ".join(map(_shown, (first, *problems))))


def _shown(line: str) -> str:
    line = printable(" ".join(line.split("\n")))
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


class RunFailed(RuntimeError):
    """The input is valid, but the run cannot continue."""


def refuse_empty(name: object, what: str, give: str) -> None:
    """Raise UserError for an empty name, as of a shell variable that is not set: a path takes it for this folder."""
    if not str(name).strip():
        raise UserError(f"'{name}' names no {what}; give {give}")


class Terminated(SystemExit):
    """A signal ended the command where it had something to clean up or to save. Exit code 143, a shell's for SIGTERM.

    by: the signal's name; SIGUSR1 and SIGQUIT end a command in the same way."""

    def __init__(self, by: str = "SIGTERM") -> None:
        super().__init__(TERMINATED)
        self.by = by


def error_line(error: BaseException) -> str:
    """Return `ValueError: text (file.py:12)` for an exception of foreign code: the place where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {_text_of(error)}".split())[:_ERROR_LENGTH]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def error_trace(error: BaseException) -> str:
    """Return the traceback below our own frame; only its end if it is long."""
    whole = error.__traceback__
    below = whole.tb_next if whole is not None else None
    return "".join(traceback.format_exception(type(error), error, below or whole)).strip()[-_TRACE_LENGTH:]


def _text_of(error: BaseException) -> str:
    """The exception's text. The broad `except` is needed: `__str__` of a foreign exception may raise as well."""
    try:
        return str(error)
    except BaseException as inner:
        return f"its text raises {type(inner).__name__}"


def type_of(value: object) -> str:
    """Name a value's Python type with its article, for a message: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def nearest_file(path: Path) -> str:
    """Return `; did you mean 'x'?` for the closest name in the folder of a file that is missing, or an empty string."""
    if path.is_symlink():
        return dangling(path)
    try:
        names = [entry.name for entry in islice(path.parent.iterdir(), MOST_NAMES)]
    except (OSError, ValueError):
        return ""
    matches = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"; did you mean '{path.parent / matches[0]}'?" if matches else ""


def dangling(path: Path, *names: str) -> str:
    """Return `; x is a link to y, which does not exist` for the first such link of `path` and `names` in its folder, or
    an empty string."""
    for link in (path, *(path / name for name in names)):
        if link.is_symlink() and not link.exists():
            return f"; '{link}' is a link to '{link.readlink()}', which does not exist"
    return ""


def runs_in(folder: Path) -> str:
    """Return `; it holds the run x` for a folder of runs that was given in place of a run, or an empty string."""
    try:
        names = sorted(
            entry.name for entry in islice(folder.iterdir(), MOST_NAMES) if (entry / "config.yaml").is_file()
        )
    except (OSError, ValueError):
        return ""
    shown = ", ".join(str(folder / name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return f"; it holds the run{'s' if len(names) > 1 else ''} {shown}" if names else ""


def nearest(word: str, allowed: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean 'x'?` for the closest allowed word, or an empty string if no word is close.

    A single word that begins with `word` or has it as a part, as wandb_project for wandb, is closer than any other."""
    words = list(allowed)
    longer = [one for one in words if word in one.split("_") or one.startswith(word)]
    matches = longer if len(longer) == 1 else difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f"; did you mean '{matches[0]}'?" if matches else ""
