"""How a run ended, in its run.json: `"ended": {"how": "failed", "why": "step 3: ..."}`.

    finished   all steps are done
    failed     an error ended it; `why` is its message
    stopped    Ctrl-C or SIGTERM

A run that starts or is resumed writes run.json again, without this. So it is missing while a run is live, and of a run
whose process was killed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octetrl.config.errors import RunFailed, UserError
from octetrl.config.sigterm import is_of_sigterm
from octetrl.config.text import ESCAPE, printable
from octetrl.telemetry.sinks import RUN_FILE

FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
MOST = 2_000  # characters of a reason


class Ending(NamedTuple):
    """`why`: empty for a finished run."""

    how: str
    why: str = ""

    @property
    def text(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


def ending_of(error: BaseException | None) -> Ending:
    """The ending of a run that raised `error`. None: it did all its steps."""
    if error is None:
        return Ending(FINISHED)
    if isinstance(error, KeyboardInterrupt):
        return Ending(STOPPED, "by Ctrl-C")
    if is_of_sigterm(error):
        return Ending(STOPPED, "by SIGTERM")
    said = str(error)
    if not isinstance(error, UserError | RunFailed):
        said = f"{type(error).__name__}: {said}"
    return Ending(FAILED, said if len(said) <= MOST else f"{said[:MOST]} ...")


def write_ending(folder: Path, ending: Ending) -> None:
    """Adds it to run.json. Writes a temporary file and renames it. A folder without a sound run.json stays as it is."""
    path, aside = folder / RUN_FILE, folder / f"{RUN_FILE}.partial"
    try:
        known = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return
    if not isinstance(known, dict):
        return
    try:
        with aside.open("w", encoding="utf-8", errors=ESCAPE) as file:
            json.dump({**known, "ended": {"how": ending.how, "why": ending.why}}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_ending(where: Mapping[str, Any], recipe: Mapping[str, Any], steps: Sequence[int]) -> Ending | None:
    """From a run.json, a recipe and the steps with metrics. None: the run is live, or its process was killed.

    A run that is older than this field has finished if it has the metrics of its last step."""
    ended = where.get("ended")
    if isinstance(ended, Mapping) and ended.get("how") in (FINISHED, FAILED, STOPPED):
        why = ended.get("why")
        return Ending(ended["how"], printable(" ".join(why.split())) if isinstance(why, str) else "")
    return Ending(FINISHED) if "ended" not in where and steps and steps[-1] == recipe.get("steps") else None
