"""The files of a run's folder, and whether a new run may start there. Needs no torch.

    config.yaml  history.jsonl  run.json  metrics.jsonl  rollouts/  evaluations/  checkpoints/  warnings.jsonl
    report.html  events.out.tfevents.*  lock  workers.json  logs/

A folder with a `config.yaml` holds a run. In any other folder a new run starts only if it neither overwrites nor
continues what it did not write: none of these names may be there. `lock` is an exception, and beside it what a run
writes before its `config.yaml` (`EARLY`): a run that was killed at its start left them, and they are replaced. Nothing
in the folder but `lock` is opened to decide this.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from octetrl.run.folder.lock import LOCK, foreign, process_of
from octetrl.system.errors import UserError
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import HISTORY_FILE, METRICS_FILE, RUN_FILE, WARNINGS
from octetrl.workers.many.status import STATUS_FILE

RECIPE_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
# Patterns of names: what a run leaves besides its recipe, and what it writes before that.
RECORDS = (
    *(RUN_FILE, METRICS_FILE, ROLLOUTS, EVALUATIONS, CHECKPOINTS, HISTORY_FILE, WARNINGS, REPORT),
    "events.out.tfevents.*",
    *(f"{RUN_FILE}.partial", f"{WARNINGS}.partial", f".{REPORT}"),
)
EARLY = (STATUS_FILE, f".{STATUS_FILE}", f"{RECIPE_FILE}.partial")


def refuse_used(folder: Path, *, was_taken: bool | None = None) -> None:
    """Refuse a new run in the folder of another one, or among files that it would overwrite."""
    if os.path.lexists(folder / RECIPE_FILE):
        raise UserError(
            f"output_dir: '{folder}' already holds a run; continue it with --resume,"
            f" or give another folder: output_dir=..."
        )
    refuse_records(folder, was_taken=was_taken)


def refuse_records(folder: Path, *, was_taken: bool | None = None) -> None:
    """Refuse a run in a folder without a recipe, but with files that it would overwrite or continue. Empty folders do
    not count, links do. was_taken: whether an earlier run has left its `lock`; None: the file that is there says so."""
    has_lock = process_of(folder) is not None
    was_taken = has_lock if was_taken is None else was_taken
    names = (*RECORDS, *(() if was_taken else EARLY), *(() if has_lock else (LOCK,)))
    if used := sorted(path.name for path in _written(folder, names) if not _is_empty_folder(path)):
        raise foreign(folder, used)


def refuse_unwritable(folder: Path) -> None:
    """Refuse a folder for a run, or the first of its parents that is there, in which no file can be created. Raises
    OSError if the path can't be one."""
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        reason = "Permission denied" if place.is_dir() else "Not a directory"
        raise UserError(f"output_dir: cannot write in '{folder}' ({reason}); choose another folder")


def forget_run(folder: Path) -> None:
    """Remove what a run wrote, for one that begins again. Other files stay."""
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
