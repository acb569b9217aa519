"""A reward that is a Python function of the user's: `module:name`, called as `reward(task, completion_text) -> float`.

The module is looked for as Python does, in the working directory too. It is imported once here, so that a
misspelt name is an error before anything is built, and again in each reward worker, where it runs.
`examples/custom_reward.py` is one.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from functools import cached_property

from octetrl.config.errors import UserError, nearest
from octetrl.environments.base import Scorer
from octetrl.records import Task


@dataclass(frozen=True)
class PythonReward:
    """The function at `path`, a scorer. Raises UserError when it can't be imported or called."""

    path: str

    def __post_init__(self) -> None:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())
        _ = self._function

    def __call__(self, task: Task, completion_text: str) -> float:
        return self._function(task, completion_text)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}  # not the function: the worker imports its own

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        _ = self._function  # before the first call, whose time is limited

    @cached_property
    def _function(self) -> Scorer:
        module_name, colon, name = self.path.partition(":")
        if not (module_name and colon and name):
            raise UserError(
                f"environment.reward: '{self.path}' is not of the form 'module:name', as in 'rewards:exact'"
            )
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UserError(
                f"environment.reward: module '{module_name}' does not import ({error});"
                " it is looked for in the working directory and on PYTHONPATH"
            ) from error
        except (SyntaxError, NameError, AttributeError, TypeError, ValueError, OSError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"environment.reward: module '{module_name}' fails when imported ({reason})") from error
        function = getattr(module, name, None)
        if not callable(function):
            known = [word for word in vars(module) if callable(getattr(module, word)) and not word.startswith("_")]
            raise UserError(
                f"environment.reward: module '{module_name}' has no function '{name}'{nearest(name, known)}"
            )
        scorer: Scorer = function
        return scorer
