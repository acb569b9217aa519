"""Settings that a resumed run changed, in its history.jsonl: `{"step": 32, "field": "steps", "old": 30, "new": 40}`.

Only such a run has the file. `step` is that of the checkpoint from which it went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octetrl.config.text import printable

HISTORY_FILE = "history.jsonl"


def changed_settings(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """A text for each change, oldest first; damaged lines are left out."""
    keys = {"step", "field", "old", "new"}
    return [
        printable(f"{line['field']}: {line['old']} until step {line['step']}, then {line['new']}")
        for line in lines
        if keys <= line.keys() and isinstance(line["step"], int) and isinstance(line["field"], str)
    ]
