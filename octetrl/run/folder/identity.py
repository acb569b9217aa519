"""Which run a folder and its checkpoints belong to.

A run gets a random id when it starts. `run.json` in its folder and the manifest of each checkpoint contain it.
`run.json` also says where the run was started or resumed last (commit, machine, versions) and the linears' formats.
Only checkpoints of the folder's own run are resumed from, exported or pruned. A folder without `run.json` belongs to
the run of its checkpoints, if they all belong to one run.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path

from octetrl.run.folder.layout import CHECKPOINTS
from octetrl.system.errors import UserError
from octetrl.system.files import replaced_file
from octetrl.telemetry.ending import LIVE
from octetrl.telemetry.sinks import RUN_FILE
from octetrl.trainer import checkpoint

_SHOWN = 3


def new_run_id() -> str:
    """A new id from the operating system's entropy, so that no random generator of a run advances."""
    return uuid.uuid4().hex[:12]


def read_run_id(run_folder: Path) -> str | None:
    """The id of the folder's run; None if it has no run.json and no checkpoint. Raises UserError if it is not clear."""
    path = run_folder / RUN_FILE
    try:
        run_id = json.loads(path.read_bytes())["run"]
    except FileNotFoundError:
        return _id_of_checkpoints(run_folder)
    except (ValueError, TypeError, KeyError, RecursionError):
        run_id = None
    if not isinstance(run_id, str):
        raise UserError(f"'{path}' does not name a run; restore it, or delete it if all checkpoints belong to one run")
    return run_id


def write_run_id(run_folder: Path, run_id: str, where: Mapping[str, object]) -> None:
    """Write run.json of a run that starts. `where`: where it runs, and in which formats."""
    with replaced_file(run_folder / RUN_FILE) as file:
        json.dump({"run": run_id, **where, **LIVE}, file)


def refuse_foreign_checkpoints(run_folder: Path, run_id: str | None) -> None:
    """Raises UserError naming the checkpoints of another run. One with an unreadable manifest may be this run's."""
    owners = checkpoint.owners(run_folder / CHECKPOINTS)
    foreign = [name for name, owner in owners.items() if owner not in (run_id, checkpoint.UNKNOWN)]
    if foreign:
        raise UserError(
            f"--resume: '{run_folder / CHECKPOINTS}' holds checkpoints of another run ({_some(foreign)});"
            f" move them out of this folder, then --resume"
        )


def _id_of_checkpoints(run_folder: Path) -> str | None:
    owners = checkpoint.owners(run_folder / CHECKPOINTS)
    ids = {owner for owner in owners.values() if owner != checkpoint.UNKNOWN}
    if len(ids) > 1:
        raise UserError(
            f"'{run_folder / CHECKPOINTS}' holds checkpoints of {len(ids)} runs ({_some(list(owners))}), and no"
            f" {RUN_FILE} says which run owns the folder; name one checkpoint, or move the others out"
        )
    return ids.pop() if ids else None


def _some(names: list[str]) -> str:
    """`names`, sorted, with the middle of a long list left out."""
    names = sorted(names)
    return ", ".join(names if len(names) <= _SHOWN else [*names[:_SHOWN], f"{len(names) - _SHOWN} more"])
