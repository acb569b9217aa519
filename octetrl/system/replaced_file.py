"""Replace a text file as a whole, so that a kill leaves the old file or the new one."""

from __future__ import annotations

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
