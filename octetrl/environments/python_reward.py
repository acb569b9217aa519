"""A reward that the user wrote as a Python function: `module:name`, called as `reward(task, completion_text) -> float`.

A function of TRL's form, (prompts, completions, **columns) -> list[float], is taken too (environments/trl_rewards.py).
An object given in Python is recognised by its parameters in the same way.

Only the reward workers import it, so that its import cannot affect the run. A misspelt name is an error when the first
worker loads it. `examples/custom_reward.py` is an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from octetrl.environments.base import Scorer
from octetrl.environments.python_object import Given, check_path, import_object
from octetrl.environments.score import check_signature, place_of
from octetrl.environments.trl_rewards import TrlRewards, has_trl_form
from octetrl.records import Task
from octetrl.system.errors import UserError, type_of

_FIELD = "environment.reward"


def named_reward(path: str, given: Given) -> Scorer:
    """The reward that a recipe names: an object given in Python, or the function at `module:name`."""
    if path not in given:
        return PythonReward(path)
    scorer: Scorer = given[path]
    return TrlRewards([scorer]) if has_trl_form(scorer) else scorer


@dataclass(frozen=True)
class PythonReward:
    """The function at `path`, a scorer. Raises UserError, in a worker, when it can't be imported or called."""

    path: str

    def __post_init__(self) -> None:
        check_path(_FIELD, self.path)

    def __call__(self, task: Task, completion_text: str) -> float:
        return self._function(task, completion_text)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}  # the function is not pickled: the worker imports it

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        _ = self._function  # before the first call, whose time is limited

    @cached_property
    def _function(self) -> Scorer:
        function = import_object(_FIELD, self.path)
        if not callable(function):
            raise UserError(f"{_FIELD}: '{self.path}' is {type_of(function)}, not a function")
        if has_trl_form(function):
            return TrlRewards([function])
        check_signature(function, f"{_FIELD}: '{self.path}'")
        scorer: Scorer = function
        return scorer

    @property
    def place(self) -> str:
        """Name, file and line of the function."""
        return place_of(self._function)
