"""The files of a run's folder, who holds it, and whether a new run may start there. Needs no torch.

    config.yaml  history.jsonl  run.json  metrics.jsonl  rollouts/  evaluations/  checkpoints/  warnings.jsonl
    report.html  events.out.tfevents.*  lock  workers.json  logs/

A folder with a `config.yaml` holds a run. In any other folder a new run starts only if it neither overwrites nor
continues what it did not write: none of these names may be there. Where a run was killed at its start, its `lock` is
there, and what a run writes before its `config.yaml` (`EARLY`) is replaced.

One live run holds a folder. The folder itself is locked, so no deleted file frees it. On NFS other machines do not see
that lock, so `lock`, the file that names the run's process, is locked as well. Both locks end with the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from octetrl.system.errors import UserError
from octetrl.system.files import folder_lock
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import HISTORY_FILE, METRICS_FILE, RUN_FILE, WARNINGS
from octetrl.workers.status import STATUS_FILE

RECIPE_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
LOCK = "lock"
# Patterns of names: what a run leaves besides its recipe, and what it writes before that.
RECORDS = (
    *(RUN_FILE, METRICS_FILE, ROLLOUTS, EVALUATIONS, CHECKPOINTS, HISTORY_FILE, WARNINGS, REPORT),
    "events.out.tfevents.*",
    *(f"{RUN_FILE}.partial", f"{WARNINGS}.partial", f".{REPORT}"),
)
EARLY = (STATUS_FILE, f".{STATUS_FILE}", f"{RECIPE_FILE}.partial")
PROBED = 0.05  # seconds; longer than `is_held` holds a lock
_ATTEMPTS = 1000  # to take a folder that refused runs remove at the same time


# ---------------------------------------------------------------- who holds a folder


class FolderLock:
    """Holds the folder at `path`, and creates it if needed. Raises UserError if a live run holds it, and OSError if it
    can't be created or written in. `was_taken`: whether an earlier run has left its `lock` there."""

    def __init__(self, path: Path) -> None:
        self._path, self._made, self._locks, self.was_taken = path, set[Path](), ExitStack(), False
        try:
            for attempt in range(_ATTEMPTS):
                if self._take(is_last=attempt > 0):
                    return
            raise FileNotFoundError(errno.ENOENT, "folders can't be created there")
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Removes what taking the folder has created, as far as nobody else uses it, and releases it."""
        for path in sorted(self._made, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # others have files there, or removed it
                path.rmdir() if path.is_dir() else path.unlink()
        self.release()

    def release(self) -> None:
        self._locks.close()

    def _take(self, *, is_last: bool) -> bool:
        """False: a refused run removed the folder or its lock in between, or somebody only asks who holds it."""
        lock = self._path / LOCK
        self._made |= {path.absolute() for path in (lock, self._path, *self._path.parents) if not os.path.lexists(path)}
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            if not self._locks.enter_context(folder_lock(self._path)):
                raise BlockingIOError
            self.was_taken = process_of(self._path) is not None
            if not self.was_taken and os.path.lexists(lock):
                raise foreign(self._path, [LOCK])
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            file = self._locks.enter_context(os.fdopen(descriptor, "r+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                raise FileNotFoundError
        except (FileNotFoundError, FileExistsError):
            self.release()
            if any(folder.exists() and not folder.is_dir() for folder in (self._path, *self._path.parents)):
                raise
            return False
        except BlockingIOError:
            self.release()
            self._made.discard(lock.absolute())
            if is_last:
                raise live_run(self._path) from None
            time.sleep(PROBED)
            return False
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return True


def process_of(folder: Path) -> str | None:
    """The id in the `lock` of a run's folder, perhaps empty; None if there is no such file of a run's."""
    with suppress(OSError), _opened(folder) as lock:
        text = os.read(lock, 20).decode(errors="replace").strip()
        return text if not text or text.isdecimal() else None
    return None


def is_held(folder: Path) -> bool:
    """Whether a live process holds the folder. The id in `lock` alone is no proof: a notebook lives on."""
    with suppress(OSError), folder_lock(folder, shared=True) as is_free:
        if not is_free:
            return True
    with suppress(OSError), _opened(folder) as lock:  # also of another machine
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def refuse_live(folder: Path) -> None:
    """Refuse what would write or remove files of a live run."""
    if is_held(folder):
        raise live_run(folder)


def live_run(folder: Path) -> UserError:
    return UserError(
        f"output_dir: '{folder}' is in use by a live run (process {process_of(folder) or 'unknown'});"
        f" wait for it or choose another folder"
    )


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """The `lock` of a folder, if it is a regular file. Waits for nobody who would write a pipe."""
    descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- whether a run may start


def refuse_used(folder: Path, *, was_taken: bool) -> None:
    """Refuse a new run in the folder of another one, or among files that it would overwrite. was_taken: an earlier run
    has left its `lock` there."""
    if os.path.lexists(folder / RECIPE_FILE):
        raise UserError(
            f"output_dir: '{folder}' already holds a run; continue it with --resume,"
            f" or give another folder: output_dir=..."
        )
    refuse_records(folder, was_taken=was_taken)


def refuse_records(folder: Path, *, was_taken: bool) -> None:
    """Refuse a run in a folder without a recipe, but with files that it would overwrite or continue. Empty folders do
    not count, links do."""
    names = RECORDS if was_taken else (*RECORDS, *EARLY)
    if used := sorted(path.name for path in _written(folder, names) if not _is_empty_folder(path)):
        raise foreign(folder, used)


def foreign(folder: Path, names: Collection[str]) -> UserError:
    return UserError(
        f"output_dir: '{folder}' holds {', '.join(names)}, which this run did not write; choose another folder:"
        " output_dir=..."
    )


def refuse_unwritable(folder: Path) -> None:
    """Refuse a folder for a run, or the first of its parents that is there, in which no file can be created. Raises
    OSError if the path can't be one."""
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "Permission denied" if place.is_dir() else "Not a directory"
        raise UserError(f"output_dir: cannot write in '{folder}' ({reason}); choose another folder")


def remove_run(folder: Path) -> None:
    """Remove what a run wrote, for one that begins again or was refused. Other files stay."""
    for path in _written(folder, (RECIPE_FILE, *RECORDS, *EARLY, LOCK)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _written(folder: Path, patterns: Collection[str]) -> list[Path]:
    names = os.listdir(folder) if folder.is_dir() else []
    return [folder / name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
