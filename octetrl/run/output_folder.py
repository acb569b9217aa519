"""The run folder: who may write in it.

    config.yaml  metrics.jsonl  rollouts/  checkpoints/  events.out.tfevents.*  lock

A lock held by the operating system (it ends with the process, however that ends) keeps two live runs apart; the
resolved recipe in `config.yaml` keeps two different runs apart.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

from octetrl.config.errors import UserError
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.config.schema import Recipe

MAY_CHANGE = ("steps", "output_dir", "logging", "cluster", "evaluation", "checkpoint", "mismatch")


class OutputFolder:
    """Opened before anything is built, so that two runs cannot both begin; `keep` once everything is built.

    A context manager. If it ends before `keep` (the run was refused), what it made is removed again.
    """

    def __init__(self, recipe: Recipe, *, resume: bool) -> None:
        self.path = Path(recipe.output_dir)
        self._recipe = recipe
        self._kept = self.path.exists()
        if not resume and (self.path / "config.yaml").exists():
            raise UserError(
                f"output_dir: '{self.path}' already holds a run; continue it with --resume,"
                f" or give another folder: output_dir=..."
            )
        if resume and not (self.path / "config.yaml").exists():
            raise UserError(f"--resume: '{self.path}' holds no run; leave --resume out to start one there")
        self._check_same_recipe()
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        self._first_made = missing[-1] if missing else None
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()

    def keep(self) -> None:
        """The run begins: its resolved recipe is written, aside and renamed, so that a kill leaves a whole one."""
        aside = self.path / "config.yaml.partial"
        with self._writing():
            with aside.open("w", encoding="utf-8") as file:
                file.write(dump_recipe(self._recipe))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(self.path / "config.yaml")
        self._kept = True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"output_dir: cannot write in '{self.path}' ({error.strerror}); choose another folder"
            ) from error

    def _take_lock(self) -> IO[str]:
        lock = open(self.path / "lock", "a+")  # noqa: SIM115 - held for the life of the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise UserError(
                f"output_dir: '{self.path}' is in use by a live run (process {owner});"
                f" wait for it or choose another folder"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock

    def _check_same_recipe(self) -> None:
        """Resuming may prolong a run or log it otherwise; it may not change what is computed."""
        saved = self.path / "config.yaml"
        if not saved.exists():
            return
        before, now = load_recipe(str(saved)).model_dump(), self._recipe.model_dump()
        for recipe in (before, now):
            del recipe["environment"]["max_failure_share"]  # when to stop; it computes nothing
        changed = [key for key in now if key not in MAY_CHANGE and before[key] != now[key]]
        if changed:
            raise UserError(
                f"--resume: '{self.path}' was started with another recipe (different: {', '.join(sorted(changed))});"
                f" resume it with its own config.yaml, or start anew in another output_dir"
            )

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()
        if self._kept:
            return
        if self._first_made is not None:
            shutil.rmtree(self._first_made)
