"""One live run in a folder: locks of the operating system, which end with the process.

The folder itself is locked, so no deleted file frees it. Of a folder on NFS, other machines do not see that lock. So
`lock`, the file that names the run's process, is locked as well.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from octetrl.system.errors import UserError
from octetrl.system.files import folder_lock

LOCK = "lock"
PROBED = 0.05  # seconds; longer than `octetrl status` holds a lock
_ATTEMPTS = 1000  # to take a folder that refused runs remove at the same time
_LONGEST = 20  # bytes of a process id


class FolderLock:
    """Holds the folder at `path`, and creates it if needed. Raises UserError if a live run holds it, and OSError if it
    can't be created or written in. `was_taken`: whether an earlier run has left its `lock` there."""

    def __init__(self, path: Path) -> None:
        self.was_taken = False
        self._locks = ExitStack()
        self._made: set[Path] = set()
        try:
            self._take(path)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Remove what taking the folder has created, as far as nobody else uses it, and release it."""
        for path in sorted(self._made, key=lambda path: len(path.parts), reverse=True):
            with suppress(OSError):  # others have files there, or removed it
                path.rmdir() if path.is_dir() else path.unlink()
        self.release()

    def release(self) -> None:
        self._locks.close()

    def _take(self, path: Path) -> None:
        was_held = False
        for _ in range(_ATTEMPTS):
            try:
                return self._try_once(path)
            except (FileNotFoundError, FileExistsError):  # a refused run removed the folder in between
                self._locks.close()
                if any(folder.exists() and not folder.is_dir() for folder in (path, *path.parents)):
                    raise
            except BlockingIOError:
                self._locks.close()
                if was_held:
                    raise live_run(path) from None
                was_held = True
                time.sleep(PROBED)
        raise FileNotFoundError(errno.ENOENT, "folders can't be created there")

    def _try_once(self, path: Path) -> None:
        self._made |= {folder.absolute() for folder in (path, *path.parents) if not folder.exists()}
        path.mkdir(parents=True, exist_ok=True)
        if not self._locks.enter_context(folder_lock(path)):
            raise BlockingIOError
        self.was_taken = process_of(path) is not None
        if not self.was_taken and os.path.lexists(path / LOCK):
            raise foreign(path, [LOCK])
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        file = self._locks.enter_context(os.fdopen(descriptor, "r+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._made |= set() if self.was_taken else {(path / LOCK).absolute()}
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()


def process_of(folder: Path) -> str | None:
    """The id in the `lock` of a run's folder, perhaps empty; None if there is no such file of a run's."""
    with suppress(OSError), _opened(folder) as lock:
        text = os.read(lock, _LONGEST + 1)
        if len(text) <= _LONGEST and (not text.strip() or text.strip().isdigit()):
            return text.decode().strip()
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


def foreign(folder: Path, names: Collection[str]) -> UserError:
    """What to say of files that have a run's names but are not its own."""
    return UserError(
        f"output_dir: '{folder}' holds {', '.join(names)}, which this run did not write; choose another folder:"
        " output_dir=..."
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
