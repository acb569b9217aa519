"""Files that a command writes last, after long work: tested before it, and a failure is one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octetrl.system.errors import UserError


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
    with writes(option, path, "folder"):
        if not path.is_dir():
            path.mkdir()
            path.rmdir()
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
