"""Settings that a resumed run changed, in its history.jsonl: `{"step": 32, "field": "steps", "old": 30, "new": 40}`.

Only such a run has the file. `step` is that of the checkpoint from which it went on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octetrl.system.text import printable

HISTORY_FILE = "history.jsonl"


def changed_settings(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """A text for each change, oldest first; damaged lines are left out."""
    keys = {"step", "field", "old", "new"}
    return [
        printable(f"{line['field']}: {_shown(line['old'])} until step {line['step']}, then {_shown(line['new'])}")
        for line in lines
        if keys <= line.keys() and isinstance(line["step"], int) and isinstance(line["field"], str)
    ]


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file that has one a line; what is damaged is left out."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            yield found


def _shown(value: Any) -> Any:
    """A digest of each part, in short, for what has several."""
    if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
        return ", ".join(f"{part} {digest[:8]}" for part, digest in value.items())
    return value
