"""What lies in the folder of a run, and whether a new run may start there. Needs no torch.

A folder with a `config.yaml` is a run's. In any other a new run starts only if it neither overwrites nor continues a
file that was there. Three files are written before `config.yaml`, so a run that was killed at its start leaves them.
They are replaced, unless their content is not a run's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from octetrl.config.errors import UserError
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import METRICS_FILE, RUN_FILE
from octetrl.telemetry.step_lines import PUT_BACK, WARNINGS
from octetrl.workers.many.status import STATUS_FILE

RECIPE_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
HISTORY_FILE = "history.jsonl"  # of settings that a resumed run changed
REPORT = "report.html"
LOCK = "lock"  # with the id of the process that holds it
LONGEST_LOCK = 20  # bytes

# What a run leaves, besides its recipe.
RECORDS = (
    *(METRICS_FILE, ROLLOUTS, EVALUATIONS, CHECKPOINTS, HISTORY_FILE, PUT_BACK, WARNINGS, REPORT),
    "events.out.tfevents.*",
)
EARLY = {RUN_FILE: "run", STATUS_FILE: "workers"}  # before its recipe, and a key that each has


def records_in(run_folder: Path) -> list[str]:
    """Names of a run's files and folders; empty subfolders do not count."""
    return sorted({path.name for path in _found(run_folder)})


def refuse_held(folder: Path) -> None:
    """Refuse a new run in the folder of another one, or among files that it would write over."""
    if (folder / RECIPE_FILE).exists():
        raise UserError(
            f"output_dir: '{folder}' already holds a run; continue it with --resume (in Python resume=True),"
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
    for name, key in EARLY.items():
        if not _has_key(folder / name, key):
            raise foreign_file(folder / name)
    if not is_lock(folder / LOCK):
        raise foreign_file(folder / LOCK)


def foreign_file(path: Path) -> UserError:
    """What to say of a file that a run would overwrite although no run has written it."""
    return UserError(
        f"output_dir: '{path}' is no run's, and a run would overwrite it; give another folder (output_dir=...),"
        f" or move it away"
    )


def is_lock(path: Path) -> bool:
    """Whether a run may take this file as its lock: it is missing, empty, or has the id of a process."""
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST_LOCK + 1).strip()
    except IsADirectoryError:
        return False
    except OSError:  # it is missing, or to open it for writing will say why not
        return True
    return len(text) <= LONGEST_LOCK and (not text or text.isdigit())


def _found(run_folder: Path) -> Iterator[Path]:
    for pattern in RECORDS:
        for path in run_folder.glob(pattern):
            if not path.is_dir() or any(path.iterdir()):
                yield path


def _has_key(path: Path, key: str) -> bool:
    """Whether it is missing, or a JSON object with this key."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and key in content
