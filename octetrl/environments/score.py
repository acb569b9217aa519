"""The score of a completion, and the checks of what a scorer takes and returns."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octetrl.environments.base import Scorer, finite_number
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError

RETURNED_BY = "; returned by "  # in the error of a reward that is no finite number


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one completion. `reward` is None unless `status` is SCORED. `detail` is then None or the scorer's
    reason; otherwise it is the error."""

    status: RolloutStatus
    reward: float | None
    detail: str | None = None
    trace: str | None = None  # the traceback behind `detail`, where there is one
    answered: str | None = None  # the completion's answer, if the scorer has `answered`


class Explained(float):
    """A reward with the reason for it. Rollouts show the reason as their detail."""

    detail: str | None

    def __new__(cls, reward: float, detail: str | None = None) -> Explained:
        made = super().__new__(cls, reward)
        made.detail = detail
        return made


@dataclass(frozen=True, slots=True)
class CheckedScorer:
    """Calls `scorer` in the worker. Raises if the reward is not a number or too large. Also returns the completion's
    answer, if the scorer has `answered(task, completion_text) -> str | None`."""

    scorer: Scorer

    def __call__(self, task: Task, completion_text: str) -> tuple[float, str | None, str | None]:
        reward = self.scorer(task, completion_text)
        try:
            number = finite_number(reward, "reward")
        except (TypeError, ValueError) as error:  # raised again with the place of the function that returned it
            raise type(error)(f"{error}{RETURNED_BY}{self._place}") from None
        answered = getattr(getattr(self.scorer, "__self__", self.scorer), "answered", None)
        detail = reward.detail if isinstance(reward, Explained) else None
        return number, None if answered is None else answered(task, completion_text), detail

    @property
    def _place(self) -> str:
        return getattr(self.scorer, "place", None) or place_of(self.scorer)


def check_signature(score: Any, what: str) -> None:
    """Raises UserError unless `score` is a plain function of (task, completion_text). what: its name in the message."""
    if inspect.iscoroutinefunction(score):
        raise UserError(
            f"{what} ({place_of(score)}) is async; write a plain function of (task, completion_text) that returns a"
            " number"
        )
    _check_call(score, what, (Task("", ""), ""), "task, completion_text", "take these two arguments")


def check_call_with_conversation(function: Any, what: str) -> None:
    """Raises UserError unless `function` can be called with a conversation alone. what: its name in the message."""
    _check_call(function, what, (None,), "conversation", "take this argument")


def _check_call(function: Any, what: str, arguments: tuple[Any, ...], names: str, remedy: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UserError(
            f"{what} ({place_of(function)}) takes {signature}, but is called with ({names}): {error}; {remedy}"
        ) from None


def place_of(score: Any) -> str:
    """Name, file and line of a function, method or callable object, such as `by_length, rewards.py:12`."""
    function = score if inspect.isroutine(score) or not callable(score) else type(score).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    name = getattr(score, "__qualname__", None) or type(score).__qualname__
    return name if code is None else f"{name}, {Path(code.co_filename).name}:{code.co_firstlineno}"
