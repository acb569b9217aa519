"""A reward that is a Python function of the user's: `module:name`, called as `reward(task, completion_text) -> float`.

It is imported in the reward workers and nowhere else, so that nothing it does when imported reaches the run. A
misspelt name is an error when the first worker loads it. `examples/custom_reward.py` is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from octetrl.config.errors import UserError
from octetrl.environments.base import Scorer
from octetrl.environments.given import Given
from octetrl.environments.python_object import check_path, import_object
from octetrl.records import Task

_FIELD = "environment.reward"


def named_reward(path: str, given: Given) -> Scorer:
    """The reward that a recipe names: one of those given in Python, or the function at `module:name`."""
    scorer: Scorer = given[path] if path in given else PythonReward(path)
    return scorer


@dataclass(frozen=True)
class PythonReward:
    """The function at `path`, a scorer. Raises UserError, in a worker, when it can't be imported or called."""

    path: str

    def __post_init__(self) -> None:
        check_path(_FIELD, self.path)

    def __call__(self, task: Task, completion_text: str) -> float:
        return self._function(task, completion_text)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}  # not the function: the worker imports its own

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        _ = self._function  # before the first call, whose time is limited

    @cached_property
    def _function(self) -> Scorer:
        function = import_object(_FIELD, self.path)
        if not callable(function):
            raise UserError(f"{_FIELD}: '{self.path}' is a {type(function).__name__}, not a function")
        scorer: Scorer = function
        return scorer
