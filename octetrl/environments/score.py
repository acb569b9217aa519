"""The score of a completion, and the check of what a scorer returns."""

from __future__ import annotations

from dataclasses import dataclass

from octetrl.environments.base import Scorer, finite_number
from octetrl.environments.score_signature import place_of
from octetrl.records import RolloutStatus, Task

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
