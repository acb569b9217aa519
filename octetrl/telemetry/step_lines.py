"""A run's file that has a line only for some steps. Without such steps there is no file.

    warnings.jsonl   {"step": 3, "text": "..."}       what the console warned of; the report shows it

A resumed run first removes the lines after its checkpoint's step.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from octetrl.system.text import ESCAPE
from octetrl.telemetry.rollouts import not_written

WARNINGS = "warnings.jsonl"


class StepLines:
    """Appends lines to such a file. resumed_step: step of the checkpoint that the run resumes from, 0 for a new run."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        if path.is_file():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= resumed_step]
            aside = path.with_suffix(".jsonl.partial")
            aside.write_bytes(b"".join(kept))
            aside.replace(path)

    def write(self, step: int, **fields: object) -> None:
        """Append a step's line and sync it to the disk. Raises UserError if it can't be written."""
        line = json.dumps({"step": step, **fields}, ensure_ascii=False)
        try:
            with self.path.open("a", encoding="utf-8", errors=ESCAPE) as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise not_written(self.path, error) from error


def _step_of(line: bytes) -> float:
    """Infinite for a line that is not of this file, which is then left out: a resumed run does not read it."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
