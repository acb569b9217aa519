"""Several reward functions by name. Their weighted sum is the reward, and each is a metric of its own.

    environment:
      reward:
        accuracy: {function: "my_rewards:accuracy"}
        polite: {function: "my_rewards:polite", weight: 0.2}
        length: {function: "my_rewards:length", weight: 0}           measured, without a part in the reward
        best: {function: "my_rewards:best", of: group}               (task, texts of all siblings) -> a number for each

A function of a completion runs where a single reward would; it may be async, or of TRL's form. None: it does not apply
to this completion. Functions of a group run in the run's process when all its completions are there, so that they can
rank them, let a judge compare them, or reward the best. If one fails, no sibling has a reward.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

from octetrl.environments.calls import CallResult, Calls
from octetrl.environments.scoring import (
    BatchScorer,
    Explained,
    Key,
    OpenScorer,
    RestartingScorer,
    RewardTimes,
    Score,
    ScoringRound,
    begin_round,
    call_all,
    check_call,
    finite_number,
    logged,
    place_of,
)
from octetrl.environments.trl_rewards import call_trl, has_trl_form
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError, type_of

_POLL_SECONDS = 1.0
_NOTHING_APPLIES = "every reward function returned None, so the completion has no reward"


@dataclass(frozen=True, slots=True)
class NamedReward:
    name: str
    function: Any  # of (task, text), or (task, texts) -> list; or async
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class NamedRewards:
    """The weighted sum of functions of a completion, as a scorer. None of a single function is left out; if none
    applies, there is no reward. before_groups: functions of groups follow, which may apply: then the sum so far is 0
    and has no components."""

    parts: tuple[NamedReward, ...]
    before_groups: bool = False

    def __call__(self, task: Task, completion_text: str) -> Explained:
        results = call_all(partial(part.function, task, completion_text) for part in self.parts)
        values, details = {}, []
        for part, result in zip(self.parts, results, strict=True):
            if result is not None:
                values[part.name] = finite_number(result, f"reward '{part.name}' of {_place(part)}")
                details += [f"{part.name}: {result.detail}"] if isinstance(result, Explained) and result.detail else []
        if not values and not self.before_groups:
            raise ValueError(_NOTHING_APPLIES)
        return Explained(_weighted(self.parts, values), "; ".join(details) or None, values)


def _weighted(parts: Sequence[NamedReward], values: Mapping[str, float]) -> float:
    return finite_number(sum(part.weight * values[part.name] for part in parts if part.name in values), "weighted sum")


def _place(part: NamedReward) -> str:
    return getattr(part.function, "place", None) or place_of(part.function)


Group = tuple[Task, list[str], list[Score]]  # the siblings' texts and scores, in their order


class WithGroupRewards:
    """`scorer`, and functions of whole groups. timeout_seconds: limit of one call of a function."""

    def __init__(self, scorer: OpenScorer, parts: Sequence[NamedReward], *, timeout_seconds: float) -> None:
        self._scorer, self._parts, self._seconds = scorer, tuple(parts), timeout_seconds
        self._calls = Calls()

    @property
    def restarts(self) -> int:
        """Reward processes of `scorer` that were replaced since the run began."""
        return self._scorer.restarts if isinstance(self._scorer, RestartingScorer) else 0

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order; neighbours with one task are a group."""
        scores = self._scorer.score(completions)
        groups: list[Group] = []
        for (task, text), score in zip(completions, scores, strict=True):
            if not groups or groups[-1][0] is not task:
                groups.append((task, [], []))
            groups[-1][1].append(text)
            groups[-1][2].append(score)
        return [score for added in self.with_groups(groups) for score in added]

    def begin(self) -> GroupRound:
        """Completions whose own functions work beside the engine; those of groups follow at the end."""
        return GroupRound(self, self._scorer)

    def with_groups(self, groups: Sequence[Group]) -> list[list[Score]]:
        """The scores with what the functions of each group add. All functions work at once."""
        results: list[dict[str, CallResult]] = [{} for _ in groups]
        waiting = {
            self._calls.start(_checked(part), (part, task, tuple(texts)), seconds=self._seconds): (place, part.name)
            for place, (task, texts, _) in enumerate(groups)
            for part in self._parts
        }
        try:
            while waiting:
                for ticket, called in self._calls.poll(_POLL_SECONDS):
                    place, name = waiting.pop(ticket)
                    results[place][name] = called
        finally:
            self._calls.forget()  # interrupted: the answers are no longer needed
        return [self._added(scores, called) for (_, _, scores), called in zip(groups, results, strict=True)]

    def close(self) -> None:
        self._scorer.close()
        self._calls.close()

    def _added(self, scores: Sequence[Score], results: Mapping[str, CallResult]) -> list[Score]:
        for name, called in results.items():
            if called.error is not None:
                status = RolloutStatus.REWARD_TIMEOUT if called.timed_out else RolloutStatus.REWARD_ERROR
                late = f"no rewards after {self._seconds:g} s; raise environment.reward_timeout_seconds"
                detail = f"{name}: {called.error}{f' ({late})' if called.timed_out else ''}"
                return [Score(status, None, detail, called.trace) for _ in scores]
        given = {part.name: results[part.name].value for part in self._parts}  # in the order of the recipe
        metrics = {name: value for _, own in given.values() for name, value in own.items()}
        added = []
        for place, score in enumerate(scores):
            values = {name: of_group[place] for name, (of_group, _) in given.items() if of_group[place] is not None}
            added.append(score if score.reward is None else self._sum(score, values, metrics))
        return added

    def _sum(self, score: Score, values: Mapping[str, float], metrics: Mapping[str, float]) -> Score:
        assert score.reward is not None
        components = {**score.components, **values}
        try:
            if not components:
                raise ValueError(_NOTHING_APPLIES)
            reward = finite_number(score.reward + _weighted(self._parts, values), "weighted sum")
        except ValueError as error:
            return Score(RolloutStatus.REWARD_ERROR, None, str(error))
        return replace(score, reward=reward, components=components, metrics={**score.metrics, **metrics})


class GroupRound(ScoringRound):
    """A round of `scorer`, then the groups' functions. No score is final before `finish`."""

    def __init__(self, rewards: WithGroupRewards, scorer: BatchScorer) -> None:
        self._rewards, self._round = rewards, begin_round(scorer)
        self._groups: dict[int, dict[Key, tuple[Task, str]]] = {}  # by place of the task

    def __enter__(self) -> GroupRound:
        self._round.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._round.__exit__(kind, error, trace)

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        self._groups.setdefault(key[0], {})[key] = (task, completion_text)
        self._round.submit(key, task, completion_text)

    def advance(self) -> None:
        self._round.advance()

    def so_far(self) -> dict[Key, Score]:
        return {}

    @property
    def is_done(self) -> bool:
        return self._round.is_done

    def finish(self) -> dict[Key, Score]:
        scores, began = self._round.finish(), time.monotonic()
        keys = [sorted(group) for group in self._groups.values()]
        groups: list[Group] = []
        for of_group, group in zip(keys, self._groups.values(), strict=True):
            task, _ = group[of_group[0]]
            groups.append((task, [group[key][1] for key in of_group], [scores[key] for key in of_group]))
        for of_group, added in zip(keys, self._rewards.with_groups(groups), strict=True):
            scores |= dict(zip(of_group, added, strict=True))
        self.times = (self._round.times or RewardTimes()).followed_by(RewardTimes(time.monotonic() - began))
        return scores


def _checked(part: NamedReward) -> Callable[[NamedReward, Task, Sequence[str]], Any]:
    """What calls the function of a group: an async one on the loop that lives as long as the run."""
    function = part.function
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return _awaited_values if is_async else _values


def check_group_reward(function: Any, what: str) -> None:
    """Raises UserError unless it can be called with (task, texts), or is of TRL's form. what: its name in messages."""
    if not callable(function):
        raise UserError(f"{what} is {type_of(function)}; give a function of (task, texts)")
    if not has_trl_form(function):
        check_call(function, what, "task, texts")


def _called(part: NamedReward, task: Task, texts: Sequence[str]) -> Any:
    """Its values, or what to await for them. The task is a copy: no function changes what another one sees."""
    task = deepcopy(task)
    return call_trl(part.function, task, *texts) if has_trl_form(part.function) else part.function(task, list(texts))


Values = tuple[list[float | None], dict[str, float]]  # of each sibling; and what `log` recorded, for all of them


async def _awaited_values(part: NamedReward, task: Task, texts: Sequence[str]) -> Values:
    metrics: dict[str, float] = {}
    logged.set(metrics)  # each call has a context of its own
    return _finite_values(part, await _called(part, task, texts), len(texts)), metrics


def _values(part: NamedReward, task: Task, texts: Sequence[str]) -> Values:
    metrics: dict[str, float] = {}
    logged.set(metrics)
    return _finite_values(part, _called(part, task, texts), len(texts)), metrics


def _finite_values(part: NamedReward, values: Any, number: int) -> list[float | None]:
    values = values.tolist() if hasattr(values, "tolist") else values  # of numpy or torch
    if not isinstance(values, list | tuple) or len(values) != number:
        given = f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__
        raise ValueError(f"{_place(part)} returned {given} for {number} completions; return a list of one for each")
    return [None if value is None else finite_number(value, f"reward of {_place(part)}") for value in values]
