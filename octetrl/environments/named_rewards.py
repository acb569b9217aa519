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

A function with a limit, `max_concurrent` or `per_minute`, waits for something, such as a judge's endpoint. It runs in
the run's process, too: many calls at once on one event loop, or in threads if it is not async (calls.py). The calls of
a completion begin when it ends, beside the engine, as far as the limits allow. A failure is the completion's alone.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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
    run_async,
)
from octetrl.environments.trl_rewards import call_trl, has_trl_form
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError, type_of

_POLL_SECONDS = 0.02
MINUTE = 60.0
_NOTHING_APPLIES = "every reward function returned None, so the completion has no reward"


@dataclass(frozen=True, slots=True)
class NamedReward:
    name: str
    function: Any  # of (task, text), or (task, texts) -> list; or async
    weight: float = 1.0
    max_concurrent: int | None = None  # calls at once; None: any number
    per_minute: int | None = None  # calls that begin within any 60 s; None: any number


@dataclass(frozen=True, slots=True)
class NamedRewards:
    """The weighted sum of functions of a completion, as a scorer. None of a single function is left out; if none
    applies, there is no reward. before_others: functions that `RewardsInRun` calls follow, which may apply: then the
    sum so far is 0 and has no components."""

    parts: tuple[NamedReward, ...]
    before_others: bool = False

    def __call__(self, task: Task, completion_text: str) -> Explained:
        results = call_all(partial(part.function, task, completion_text) for part in self.parts)
        values, details = {}, []
        for part, result in zip(self.parts, results, strict=True):
            if result is not None:
                values[part.name] = finite_number(result, f"reward '{part.name}' of {_place(part)}")
                details += [f"{part.name}: {result.detail}"] if isinstance(result, Explained) and result.detail else []
        if not values and not self.before_others:
            raise ValueError(_NOTHING_APPLIES)
        return Explained(_weighted(self.parts, values), "; ".join(details) or None, values)


def _weighted(parts: Sequence[NamedReward], values: Mapping[str, float]) -> float:
    return finite_number(sum(part.weight * values[part.name] for part in parts if part.name in values), "weighted sum")


def _place(part: NamedReward) -> str:
    return getattr(part.function, "place", None) or place_of(part.function)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a function: for the completion with this key, or for the group with this place of its task."""

    part: NamedReward
    of: Key | int
    task: Task
    texts: tuple[str, ...]

    @property
    def function(self) -> Callable[[NamedReward, Task, Sequence[str], bool], Any]:
        """What calls it: an async one on the loop that lives as long as the run."""
        function = self.part.function
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        return _awaited_values if is_async else _values


class LimitedCalls:
    """Calls of functions in the run's process, each function within its limits. timeout_seconds: of one call, without
    its wait. clock: seconds, for a test."""

    def __init__(self, *, timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._calls = timeout_seconds, clock, Calls()
        self._waiting: dict[str, deque[_Call]] = {}  # by the function's name
        self._running: dict[int, _Call] = {}  # by ticket
        self._begun: dict[str, deque[float]] = {}  # when the last `per_minute` calls began

    def add(self, call: _Call) -> None:
        self._waiting.setdefault(call.part.name, deque()).append(call)

    @property
    def is_done(self) -> bool:
        return not self._running and not any(self._waiting.values())

    def advance(self, wait: float = 0.0) -> Iterator[tuple[_Call, CallResult]]:
        """Begin the calls that may, and give the results that have arrived. wait: seconds for the first."""
        for name, waiting in self._waiting.items():
            while waiting and self._may_begin(waiting[0].part):
                call = waiting.popleft()
                arguments = (call.part, call.task, call.texts, isinstance(call.of, int))
                self._running[self._calls.start(call.function, arguments, seconds=self._seconds)] = call
                if call.part.per_minute is not None:
                    self._begun.setdefault(name, deque(maxlen=call.part.per_minute)).append(self._clock())
        for ticket, called in self._calls.poll(wait):
            yield self._running.pop(ticket), called

    def clear(self) -> None:
        """Drop all calls: their results are no longer needed."""
        self._waiting.clear()
        self._running.clear()
        self._calls.forget()

    def close(self) -> None:
        self._calls.close()

    def _may_begin(self, part: NamedReward) -> bool:
        if part.max_concurrent is not None:
            running = sum(call.part.name == part.name for call in self._running.values())
            if running >= part.max_concurrent:
                return False
        begun = self._begun.get(part.name) or deque[float]()
        return part.per_minute is None or len(begun) < part.per_minute or self._clock() - begun[0] >= MINUTE


class RewardsInRun:
    """`scorer`, and functions that the run's process calls: of whole groups, and `limited` ones of a completion.
    timeout_seconds: limit of one call of a function."""

    def __init__(
        self,
        scorer: OpenScorer,
        parts: Sequence[NamedReward],
        *,
        limited: Sequence[NamedReward] = (),
        timeout_seconds: float,
    ) -> None:
        self._scorer, self.seconds = scorer, timeout_seconds
        self.of_groups, self.limited = tuple(parts), tuple(limited)
        self.calls = LimitedCalls(timeout_seconds=timeout_seconds)

    @property
    def restarts(self) -> int:
        """Reward processes of `scorer` that were replaced since the run began."""
        return self._scorer.restarts if isinstance(self._scorer, RestartingScorer) else 0

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order; neighbours with one task are a group."""
        keys: list[Key] = []
        with self.begin() as scoring:
            for number, (task, text) in enumerate(completions):
                follows = number > 0 and task is completions[number - 1][0]
                place, sibling = keys[-1] if follows else (number, -1)
                keys.append((place, sibling + 1))
                scoring.submit(keys[-1], task, text)
            scores = scoring.finish()
        return [scores[key] for key in keys]

    def begin(self) -> RoundInRun:
        """Completions whose own functions work beside the engine; those of groups follow at the end."""
        return RoundInRun(self, self._scorer)

    def close(self) -> None:
        self._scorer.close()
        self.calls.close()

    def sum(self, score: Score, called: Mapping[str, tuple[float | None, Mapping[str, float]] | Score]) -> Score:
        """`score` and the values of the further functions that apply, with what they logged. One that failed is its own
        score."""
        if score.reward is None:
            return score
        parts = [part for part in (*self.limited, *self.of_groups) if part.name in called]
        values: dict[str, float] = {}
        metrics = dict(score.metrics)
        for part in parts:
            result = called[part.name]
            if isinstance(result, Score):
                return result
            value, logs = result
            metrics |= logs
            values |= {} if value is None else {part.name: value}
        components = {**score.components, **values}
        try:
            if not components:
                raise ValueError(_NOTHING_APPLIES)
            reward = finite_number(score.reward + _weighted(parts, values), "weighted sum")
        except ValueError as error:
            return Score(RolloutStatus.REWARD_ERROR, None, str(error))
        return replace(score, reward=reward, components=components, metrics=metrics)

    def failed(self, name: str, called: CallResult) -> Score:
        status = RolloutStatus.REWARD_TIMEOUT if called.timed_out else RolloutStatus.REWARD_ERROR
        late = f" (no reward after {self.seconds:g} s; raise environment.reward_timeout_seconds)"
        return Score(status, None, f"{name}: {called.error}{late if called.timed_out else ''}", called.trace)


class RoundInRun(ScoringRound):
    """A round of `scorer`, the calls of limited functions beside it, then the groups' functions."""

    def __init__(self, rewards: RewardsInRun, scorer: BatchScorer) -> None:
        self._rewards, self._round = rewards, begin_round(scorer)
        self._groups: dict[int, dict[Key, tuple[Task, str]]] = {}  # by place of the task
        self._called: dict[Key, dict[str, tuple[float | None, Mapping[str, float]] | Score]] = {}  # by function

    def __enter__(self) -> RoundInRun:
        self._round.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rewards.calls.clear()
        self._round.__exit__(kind, error, trace)

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        self._groups.setdefault(key[0], {})[key] = (task, completion_text)
        self._called[key] = {}
        for part in self._rewards.limited:
            self._rewards.calls.add(_Call(part, key, task, (completion_text,)))
        self._round.submit(key, task, completion_text)

    def advance(self) -> None:
        self._round.advance()
        self._take(0.0)

    def so_far(self) -> dict[Key, Score]:
        """Nothing, if functions of groups follow."""
        if self._rewards.of_groups:
            return {}
        scores = self._round.so_far()
        complete = [key for key in scores if len(self._called[key]) == len(self._rewards.limited)]
        return {key: self._rewards.sum(scores[key], self._called[key]) for key in complete}

    @property
    def is_done(self) -> bool:
        return self._round.is_done and self._rewards.calls.is_done

    def finish(self) -> dict[Key, Score]:
        began = time.monotonic()
        while not self._rewards.calls.is_done:
            self._round.advance()
            self._take(_POLL_SECONDS)
        scores = self._round.finish()
        for place, group in self._groups.items():
            keys = sorted(group)
            for part in self._rewards.of_groups:
                self._rewards.calls.add(_Call(part, place, group[keys[0]][0], tuple(group[key][1] for key in keys)))
        while not self._rewards.calls.is_done:
            self._take(_POLL_SECONDS)
        self.times = replace(self._round.times or RewardTimes(), waited=time.monotonic() - began)
        return {key: self._rewards.sum(score, self._called[key]) for key, score in scores.items()}

    def _take(self, wait: float) -> None:
        """Results of calls: each one's value and what it logged, or the score of its failure."""
        for call, called in self._rewards.calls.advance(wait):
            keys = [call.of] if isinstance(call.of, tuple) else sorted(self._groups[call.of])
            values, metrics = ([None] * len(keys), {}) if called.error is not None else called.value
            failed = self._rewards.failed(call.part.name, called) if called.error is not None else None
            for key, value in zip(keys, values, strict=True):
                self._called[key][call.part.name] = failed or (value, metrics)


def check_call_in_run(function: Any, what: str, *, of_group: bool) -> None:
    """Raises UserError unless it can be called with (task, texts), or with (task, completion_text) if it is not
    `of_group`, or is of TRL's form. what: its name in messages."""
    names = "task, texts" if of_group else "task, completion_text"
    if not callable(function):
        raise UserError(f"{what} is {type_of(function)}; give a function of ({names})")
    if not has_trl_form(function):
        check_call(function, what, names)


def _called(part: NamedReward, task: Task, texts: Sequence[str], of_group: bool) -> Any:
    """What it returns, or what to await for that. The task is a copy: no function changes what another one sees."""
    task = deepcopy(task)
    if has_trl_form(part.function):
        return call_trl(part.function, task, *texts)
    return part.function(task, list(texts)) if of_group else part.function(task, texts[0])


Values = tuple[list[float | None], dict[str, float]]  # of each sibling; and what `log` recorded, for all of them


async def _awaited_values(part: NamedReward, task: Task, texts: Sequence[str], of_group: bool) -> Values:
    metrics: dict[str, float] = {}
    logged.set(metrics)  # each call has a context of its own
    return _finite_values(part, await _called(part, task, texts, of_group), len(texts), of_group), metrics


def _values(part: NamedReward, task: Task, texts: Sequence[str], of_group: bool) -> Values:
    metrics: dict[str, float] = {}
    logged.set(metrics)
    result = _called(part, task, texts, of_group)
    if inspect.isawaitable(result):  # of a function that does not look async
        result = run_async(_awaited(result))
    return _finite_values(part, result, len(texts), of_group), metrics


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _finite_values(part: NamedReward, values: Any, number: int, of_group: bool) -> list[float | None]:
    if not of_group and not has_trl_form(part.function):
        values = [values]
    values = values.tolist() if hasattr(values, "tolist") else values  # of numpy or torch
    if not isinstance(values, list | tuple) or len(values) != number:
        given = f"{len(values)} values" if hasattr(values, "__len__") else type(values).__name__
        raise ValueError(f"{_place(part)} returned {given} for {number} completions; return a list of one for each")
    return [None if value is None else finite_number(value, f"reward of {_place(part)}") for value in values]
