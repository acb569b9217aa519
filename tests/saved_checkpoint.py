"""A checkpoint as a run leaves it: staged, and committed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octetrl.trainer.checkpoint import stage


def save_checkpoint(folder: Path, step: int, payload: dict[str, Any], **options: Any) -> Path:
    """Writes `folder/step_NNNNNN`, replacing one of that step, and returns it."""
    return stage(folder, step, payload, **options).commit()
