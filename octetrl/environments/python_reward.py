"""A reward that is a Python function of the user's: `module:name`, called as `reward(task, completion_text) -> float`.

It is found by `environments/python_object.py` once here, so that a misspelt name is an error before anything is built,
and again in each reward worker, where it runs. `examples/custom_reward.py` is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from octetrl.config.errors import UserError
from octetrl.environments.base import Scorer
from octetrl.environments.python_object import load_object
from octetrl.records import Task


@dataclass(frozen=True)
class PythonReward:
    """The function at `path`, a scorer. Raises UserError when it can't be imported or called."""

    path: str

    def __post_init__(self) -> None:
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
        function = load_object("environment.reward", self.path)
        if not callable(function):
            raise UserError(f"environment.reward: '{self.path}' is a {type(function).__name__}, not a function")
        scorer: Scorer = function
        return scorer
