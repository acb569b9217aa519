"""A worker that samples slowly, and not while the driver waits for rewards. Processes of Ray import it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from octetrl.config.schema import Recipe
from octetrl.engine.session import Session
from octetrl.workers.build import BuiltWorker, build_worker


def pause_file(folder: Path | str) -> Path:
    """It exists while the workers of the run in `folder` sample nothing."""
    return Path(f"{folder}.pause")


def build_paused_worker(recipe: Recipe, *arguments: Any, **settings: Any) -> BuiltWorker:
    """In place of `build_worker`, in a process of its own."""
    advance, pause = Session._advance, pause_file(recipe.output_dir)

    def slowly(self: Session) -> Any:
        time.sleep(0.015)
        until = time.monotonic() + 60.0
        while pause.exists() and time.monotonic() < until:
            time.sleep(0.002)
        return advance(self)

    Session._advance = slowly  # type: ignore[method-assign]
    return build_worker(recipe, *arguments, **settings)
