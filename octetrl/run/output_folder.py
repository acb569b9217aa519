"""The run folder: who may write in it.

    config.yaml  metrics.jsonl  rollouts/  checkpoints/  events.out.tfevents.*  lock

A lock held by the operating system (it ends with the process, however that ends) keeps two live runs apart; the resolved
recipe in `config.yaml` keeps two different runs apart.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from octetrl.config.errors import UserError
from octetrl.config.load import dump_recipe
from octetrl.config.schema import Recipe

MAY_CHANGE = ("steps", "output_dir", "logging", "cluster", "evaluation", "checkpoint", "mismatch")


class OutputFolder:
    """Opened before anything is built and closed at the end; usable as a context manager."""

    def __init__(self, recipe: Recipe, *, resume: bool) -> None:
        self.path = Path(recipe.output_dir)
        if not resume and (self.path / "config.yaml").exists():
            raise UserError(
                f"output_dir: '{self.path}' already holds a run; continue it with --resume,"
                f" or give another folder: output_dir=..."
            )
        if resume and not (self.path / "config.yaml").exists():
            raise UserError(f"--resume: '{self.path}' holds no run; leave --resume out to start one there")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
            self._check_same_recipe(recipe)
            (self.path / "config.yaml").write_text(dump_recipe(recipe))
        except OSError as error:
            raise UserError(f"output_dir: cannot write in '{self.path}' ({error.strerror}); choose another folder") from error

    def _take_lock(self) -> IO[str]:
        lock = open(self.path / "lock", "a+")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise UserError(
                f"output_dir: '{self.path}' is in use by a live run (process {owner}); wait for it or choose another folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock

    def _check_same_recipe(self, recipe: Recipe) -> None:
        """Resuming may prolong a run or log it otherwise; it may not change what is computed."""
        saved = self.path / "config.yaml"
        if not saved.exists():
            return
        from octetrl.config.load import load_recipe

        before, now = load_recipe(str(saved), []).model_dump(), recipe.model_dump()
        changed = [key for key in now if key not in MAY_CHANGE and before[key] != now[key]]
        if changed:
            raise UserError(
                f"--resume: '{self.path}' was started with another recipe (different: {', '.join(sorted(changed))});"
                f" resume it with its own config.yaml, or start anew in another output_dir"
            )

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
