"""Runs in processes of their own, to be killed at any moment.

The processes are forked from a server that has imported the project and what it loads a tokenizer with, and computed
nothing, so that each costs a fork and not five seconds of imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from octetrl.config.load import recipe_from_mapping
from octetrl.run.loop import train

__all__ = ["Kill", "PreTrainedTokenizerFast", "start"]  # its name alone imports it: transformers' modules are lazy

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Kill:
    """SIGKILL in place of a call of `os` whose path has this end; or of the first one while another is held."""

    call: str  # fsync, rename or replace
    path_end: str
    while_held: str | None = None  # an fsync of a path with this end never returns


def start(tree: dict[str, Any], *, kill: Kill | None = None) -> BaseProcess:
    """Begin the run of this recipe, or go on with it."""
    process = _processes.Process(target=_train, args=(tree, kill))
    process.start()
    return process


def _train(tree: dict[str, Any], kill: Kill | None) -> None:
    if kill is not None:
        _die(kill)
    recipe = recipe_from_mapping(tree)
    train(recipe, resume=(Path(recipe.output_dir) / "config.yaml").exists())


def _die(kill: Kill) -> None:
    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else str(args[1])
            if name == kill.call and path.endswith(kill.path_end):
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "fsync" and kill.while_held is not None and path.endswith(kill.while_held):
                threading.Event().wait()
            return call(*args, **kwargs)

        return wrapper

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, watched(name, getattr(os, name)))
