"""Replace a file as a whole, and lock a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replaced_file(path: Path, errors: str = "strict") -> Iterator[IO[str]]:
    """Yield a temporary file beside `path`, which is synced to the disk and renamed to `path` at the end.

    After an error `path` is unchanged and the temporary file is removed. `errors`: of the encoding, as in `open`."""
    aside = path.with_name(f"{path.name}.partial")
    try:
        with aside.open("w", encoding="utf-8", errors=errors) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def folder_lock(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold the lock of a folder that exists. Yields False if another process, or this one elsewhere, holds it. Raises
    OSError if the folder can't be opened or was replaced meanwhile; where the file system has no locks, all may have
    it. shared: for a process that only asks whether another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        yield True
    finally:
        os.close(descriptor)
