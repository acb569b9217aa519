"""What lies in the folder of a run, and whether a new run may start there. Needs no torch.

A folder with a `config.yaml` is a run's. In any other a new run starts only if it neither overwrites nor continues a
file that was there. Some files are written before `config.yaml`, so a run that was killed at its start leaves them
(`EARLY`, `HALF`, `LOCK`). They are replaced, unless their content is not a run's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from octetrl.system.errors import UserError
from octetrl.system.folder_lock import folder_lock
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.run_changes import HISTORY_FILE
from octetrl.telemetry.sinks import METRICS_FILE, RUN_FILE
from octetrl.telemetry.step_lines import WARNINGS
from octetrl.workers.many.status import STATUS_FILE

RECIPE_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
LOCK = "lock"  # with the id of the process that holds it
LONGEST_LOCK = 20  # bytes

# What a run leaves, besides its recipe; patterns of names.
RECORDS = (
    *(METRICS_FILE, ROLLOUTS, EVALUATIONS, CHECKPOINTS, HISTORY_FILE, WARNINGS, REPORT),
    "events.out.tfevents.*",
    *(f"{WARNINGS}.partial", f".{REPORT}"),
)
# What it writes before its recipe is there: a key that each has, and how a file begins that is being written.
EARLY = {RUN_FILE: "run", STATUS_FILE: "workers"}
HALF = {f"{RUN_FILE}.partial": b'{"run": "', f"{RECIPE_FILE}.partial": b"precision: ", f".{STATUS_FILE}": b'{"time": '}


def records_in(run_folder: Path) -> list[str]:
    """Names of a run's files and folders; empty subfolders do not count, links do."""
    return sorted(path.name for path in _found(run_folder))


def forget_run(folder: Path) -> None:
    """Remove what a run wrote, for one that begins again. Other files stay."""
    for path in (*_found(folder), *(folder / name for name in (RECIPE_FILE, *EARLY, *HALF, LOCK))):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def refuse_live(folder: Path) -> None:
    """Refuse what would write or remove files of a live run."""
    if is_held(folder):
        raise live_run(folder, process_of(folder))


def live_run(folder: Path, process: str) -> UserError:
    """What to say of a folder whose lock this process holds."""
    return UserError(
        f"output_dir: '{folder}' is in use by a live run (process {process or 'unknown'});"
        f" wait for it or choose another folder"
    )


def process_of(folder: Path) -> str:
    """The id in the lock of a run's folder; empty if there is none."""
    return (_first(folder / LOCK, LONGEST_LOCK) or b"").decode(errors="replace").strip()


def is_held(folder: Path) -> bool:
    """Whether a live process of this machine holds the run's lock. Its id alone is no proof: a notebook lives on."""
    with suppress(OSError):  # no lock file, or a file system without locks
        try:
            with open_file(folder / LOCK) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    with suppress(OSError), folder_lock(folder, shared=True) as is_free:  # which stays when the file is deleted
        return not is_free
    return False


def refuse_held(folder: Path) -> None:
    """Refuse a new run in the folder of another one, or among files that it would write over."""
    if os.path.lexists(folder / RECIPE_FILE):
        raise UserError(
            f"output_dir: '{folder}' already holds a run; continue it with --resume,"
            f" or give another folder: output_dir=..."
        )
    refuse_records(folder)


def refuse_records(folder: Path) -> None:
    """Refuse a run in a folder without a recipe, but with files that it would overwrite or continue."""
    found = records_in(folder)
    if found:
        raise UserError(
            f"output_dir: '{folder}' holds {', '.join(found)}, as a run leaves it, but no {RECIPE_FILE}; give another"
            f" folder (output_dir=...), or put the run's {RECIPE_FILE} back and continue it with --resume"
        )
    foreign = [
        *(name for name, key in EARLY.items() if not _has_key(folder / name, key)),
        *(name for name, begin in HALF.items() if not _begins(folder / name, begin)),
        *([] if is_lock(folder / LOCK) else [LOCK]),
    ]
    for name in foreign:
        raise foreign_file(folder / name)


def foreign_file(path: Path) -> UserError:
    """What to say of a file that a run would overwrite although no run has written it."""
    return UserError(
        f"output_dir: '{path}' is no run's, and a run would overwrite it; give another folder (output_dir=...),"
        f" or move it away"
    )


def is_lock(path: Path) -> bool:
    """Whether a run may take this file as its lock: it is missing, empty, or has the id of a process."""
    text = _first(path, LONGEST_LOCK + 1)
    return text is not None and len(text) <= LONGEST_LOCK and (not text.strip() or text.strip().isdigit())


class NotAFile(OSError):
    """A link, a folder, a pipe or a device in place of a file."""


def open_file(path: Path) -> IO[bytes]:
    """A regular file, for reading. Raises NotAFile for anything else, and waits for nobody who would write a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotAFile(error.errno, error.strerror) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFile(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def _found(run_folder: Path) -> Iterator[Path]:
    try:
        names = os.listdir(run_folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = run_folder / name
        if any(fnmatchcase(name, pattern) for pattern in RECORDS) and not _is_empty_folder(path):
            yield path


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _first(path: Path, count: int) -> bytes | None:
    """The first bytes of a file. Empty: it is missing, or can't be read, and opening it for writing will say why. None:
    it is a link, or no file."""
    try:
        with open_file(path) as file:
            return file.read(count)
    except FileNotFoundError:
        return None if path.is_symlink() else b""
    except NotAFile:
        return None
    except OSError:
        return b""


def _begins(path: Path, begin: bytes) -> bool:
    """Whether it is missing, or a file that begins so, as far as it was written."""
    text = _first(path, len(begin))
    return text is not None and begin.startswith(text)


def _has_key(path: Path, key: str) -> bool:
    """Whether it is missing, or a JSON object with this key."""
    try:
        with open_file(path) as file:
            content = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return not path.is_symlink()
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and key in content
