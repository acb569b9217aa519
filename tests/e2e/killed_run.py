"""Runs in processes of their own, to be killed at any moment.

The processes are forked from a server that has imported the project and computed nothing, so that each costs a fork
and not five seconds of imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from octetrl.config.load import recipe_from_mapping
from octetrl.run.loop import train

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__, "reasoning_gym"])


def start(tree: dict[str, Any], *, kill_at_write: int | None = None) -> BaseProcess:
    """Begin the run of this recipe, or go on with it; `kill_at_write` kills it at its so many-th step onto the disk."""
    process = _processes.Process(target=_train, args=(tree, kill_at_write))
    process.start()
    return process


def _train(tree: dict[str, Any], kill_at_write: int | None) -> None:
    if kill_at_write is not None:
        _die_at_write(kill_at_write)
    recipe = recipe_from_mapping(tree)
    train(recipe, resume=(Path(recipe.output_dir) / "config.yaml").exists())


def _die_at_write(number: int) -> None:
    """SIGKILL in place of the `number`-th sync, rename or replacement of a file."""
    writes = 0

    def counted(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*args, **kwargs)

        return wrapper

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, counted(getattr(os, name)))
