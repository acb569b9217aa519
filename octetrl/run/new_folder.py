"""A folder that appears with all of its files or not at all, as `octetrl export` writes it.

    out is new       its files are written to .out.XXXXXXXX.partial beside it, which is then renamed
    out is empty     its files are written to out/.partial and then moved up, config.json as the last

An existing folder is kept, because it may be a mount point or the current folder of a shell. `out/.partial` can be
created only once, so two programs that write there do not mix their files: the second is refused. Nothing but files of
the failing program is removed. A killed program leaves the hidden folder, which may be deleted.
"""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from octetrl.system.errors import UserError

INSIDE = ".partial"
LAST = "config.json"  # a folder without it is no model
IN_USE = (errno.EEXIST, errno.ENOTEMPTY)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a hidden folder for the files of `target`, which is new or empty, and put them into place at the end.

    Raises UserError, of the option --to, if the disk refuses or another program has written to `target` meanwhile."""
    existed = target.is_dir()
    aside = target / INSIDE if existed else target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    made = False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        made = True
        yield aside
        if existed:
            _move_up(aside, target)
        else:
            aside.rename(target)  # refused by the system if `target` has files now
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno in IN_USE:
            raise UserError(
                f"--to: another program writes to '{target}', or has written to it meanwhile; give a new folder"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"--to: cannot write in '{target}' ({reason}); choose another folder") from error
    finally:
        if made:
            shutil.rmtree(aside, ignore_errors=True)


def _move_up(aside: Path, target: Path) -> None:
    """Move the files of `aside` to `target`, which holds nothing else; none of them if one fails."""
    if any(path != aside for path in target.iterdir()):
        raise FileExistsError(errno.EEXIST, "File exists", str(target))
    moved: list[Path] = []
    try:
        for file in sorted(aside.iterdir(), key=lambda file: file.name == LAST):
            moved.append(file.rename(target / file.name))
    except BaseException:
        for file in moved:
            file.unlink(missing_ok=True)
        raise
