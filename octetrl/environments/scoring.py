"""The score of a completion, the checks of what a scorer takes and returns, and one round of scores.

    with begin_round(scorer) as scoring:
        scoring.submit(key, task, text)    for each completion, while others are still being sampled
        scoring.advance()                  after every forward of the engine; never waits
        scores = scoring.finish()          by key; waits for those that are missing

Reward processes (reward_workers.py) and judges (judge.py) work beside the engine. Other scorers need what the engine
uses, the GPU or Python's lock. They score all completions in `finish`, in the order of their keys.

A step waits for rewards if they are slower than sampling. `RewardTimes` measures the wait and keeps the slowest call,
so that a run can name the slow task. `TimeoutBudget` gives up when the first calls of a step all time out: otherwise a
score that always hangs would be waited for once per rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError

_Result = TypeVar("_Result")
Scorer = Callable[[Task, str], float]
LARGEST_REWARD = 1e18  # its square is still a finite float32
RETURNED_BY = "; returned by "  # in the error for a reward that is not a finite number


def finite_number(value: object, what: str) -> float:
    """Convert a reward or metric to a float. Raises TypeError or ValueError if it is not a finite number within
    ±LARGEST_REWARD."""
    if value is None:
        raise TypeError(f"the {what} is None, not a number; its function may lack a return")
    if not isinstance(value, Real):
        raise TypeError(f"the {what} is {str(value)[:40]!r} of type {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"the {what} is beyond ±{LARGEST_REWARD:g}; scale it down") from None
    if not math.isfinite(number):
        raise ValueError(f"the {what} is {number}, not a finite number")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"the {what} is {number:g}, beyond ±{LARGEST_REWARD:g}; scale it down")
    return number


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one completion. `reward` is None unless `status` is SCORED. `detail` is then None or the scorer's
    reason; otherwise it is the error."""

    status: RolloutStatus
    reward: float | None
    detail: str | None = None
    trace: str | None = None  # the traceback behind `detail`, where there is one
    answered: str | None = None  # the completion's answer, if the scorer has `answered`
    components: Mapping[str, float] = field(default_factory=dict)  # of named rewards, unweighted
    metrics: Mapping[str, float] = field(default_factory=dict)  # of `log`


class Explained(float):
    """A reward with the reason for it, which rollouts show as their detail, and its unweighted parts by name."""

    detail: str | None
    components: Mapping[str, float]

    def __new__(
        cls, reward: float, detail: str | None = None, components: Mapping[str, float] = MappingProxyType({})
    ) -> Explained:
        made = super().__new__(cls, reward)
        made.detail, made.components = detail, components
        return made


logged: ContextVar[dict[str, float]] = ContextVar("logged")
"""The metrics of the rollout whose code runs now."""
NAME = re.compile(r"[a-z0-9_]+")  # part of a metric's name


def log(name: str, value: float) -> None:
    """Log a metric of the rollout that is being scored, or whose environment or tool runs: `environment/NAME` is the
    mean over the rollouts that have it. Raises UserError elsewhere, or for a name that is no metric's; TypeError or
    ValueError for a value that is not a finite number."""
    if not NAME.fullmatch(name):
        raise UserError(f"octetrl.log: '{name[:60]}' is not a valid name for a metric; use lower case letters and _")
    metrics = logged.get(None)
    if metrics is None:
        raise UserError("octetrl.log: no reward or environment runs here; call it inside one")
    metrics[name] = finite_number(value, f"metric '{name}'")


class Verdict(NamedTuple):
    """What a reward process sends of a completion."""

    reward: float
    answered: str | None
    detail: str | None
    components: dict[str, float]
    metrics: dict[str, float]

    @property
    def is_sound(self) -> bool:
        """Whether it is one: foreign code in the process may have sent anything."""
        numbers = [self.reward, *self.components.values(), *self.metrics.values()]
        texts = [*self.components, *self.metrics, *(text for text in (self.answered, self.detail) if text is not None)]
        return all(type(one) is float and abs(one) <= LARGEST_REWARD for one in numbers) and all(
            isinstance(one, str) for one in texts
        )


@dataclass(frozen=True, slots=True)
class CheckedScorer:
    """Calls `scorer` in the worker. Raises if the reward is not a number or too large. Also returns the completion's
    answer, if the scorer has `answered(task, completion_text) -> str | None`."""

    scorer: Scorer

    def __call__(self, task: Task, completion_text: str) -> tuple[Any, ...]:
        """A `Verdict` as a plain tuple."""
        metrics: dict[str, float] = {}
        token = logged.set(metrics)
        try:
            (reward,) = call_all([partial(self.scorer, task, completion_text)])
        finally:
            logged.reset(token)
        try:
            number = finite_number(reward, "reward")
        except (TypeError, ValueError) as error:  # raised again with the place of the function that returned it
            place = getattr(self.scorer, "place", None) or place_of(self.scorer)
            raise type(error)(f"{error}{RETURNED_BY}{place}") from None
        answered = getattr(getattr(self.scorer, "__self__", self.scorer), "answered", None)
        detail, components = (reward.detail, reward.components) if isinstance(reward, Explained) else (None, {})
        said = None if answered is None else answered(task, completion_text)
        return tuple(Verdict(number, said, detail, dict(components), metrics))


_loop: list[asyncio.AbstractEventLoop] = []  # of this process


def run_async(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Its result. In the main thread, as of a reward process, all calls share one event loop, so that a client which a
    function keeps open serves the next call too."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    if not _loop:
        _loop.append(asyncio.new_event_loop())
    return _loop[0].run_until_complete(coroutine)


def call_all(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, in their order; what is async is awaited together. After an error of one, nothing of
    the others goes on."""
    results: list[Any] = []
    try:
        for call in calls:
            results.append(call())
    except BaseException:
        for result in filter(inspect.iscoroutine, results):
            result.close()
        raise
    return run_async(_together(results)) if any(map(inspect.isawaitable, results)) else results


async def _together(results: Sequence[Any]) -> list[Any]:
    waiting = {place: asyncio.ensure_future(one) for place, one in enumerate(results) if inspect.isawaitable(one)}
    try:
        await asyncio.gather(*waiting.values())
    except BaseException:
        for task in waiting.values():
            task.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        raise
    return [waiting[place].result() if place in waiting else result for place, result in enumerate(results)]


def check_signature(score: Any, what: str) -> None:
    """Raises UserError unless `score` can be called with (task, completion_text). what: its name in the message."""
    check_call(score, what, "task, completion_text")


def check_call(function: Any, what: str, names: str) -> None:
    """Raises UserError unless `function` can be called with these positional arguments. what: its name in the message;
    names: of the arguments, such as "task, completion_text"."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C has no signature
        return
    try:
        signature.bind(*names.split(", "))
    except TypeError as error:
        raise UserError(
            f"{what} ({place_of(function)}) takes {signature}, but is called with ({names}): {error};"
            f" {'take these arguments' if ',' in names else 'take this argument'}"
        ) from None


def place_of(score: Any) -> str:
    """Name, file and line of a function, method or callable object, such as `by_length, rewards.py:12`."""
    function = score if inspect.isroutine(score) or not callable(score) else type(score).__call__
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    name = getattr(score, "__qualname__", None) or type(score).__qualname__
    return name if code is None else f"{name}, {Path(code.co_filename).name}:{code.co_firstlineno}"


@dataclass(frozen=True, slots=True)
class RewardTimes:
    """How long the rewards of a round took, or those of all rounds of a step, in seconds."""

    waited: float = 0.0  # after sampling had ended
    slowest: float = 0.0  # call
    slowest_task: str = ""

    def followed_by(self, later: RewardTimes) -> RewardTimes:
        slower = later if later.slowest > self.slowest else self
        return RewardTimes(self.waited + later.waited, slower.slowest, slower.slowest_task)

    @property
    def metrics(self) -> dict[str, float]:
        return {"time/reward": self.waited} | ({"time/reward_slowest": self.slowest} if self.slowest else {})


LEAST_TRIED = 4  # time-outs in a row, from the first call of a step on, before the others are given up


class TimeoutBudget:
    """Whether the calls of one step are worth waiting for. `tried`: number of first calls that all time out before the
    others are given up."""

    def __init__(self, tried: int) -> None:
        self._tried = max(tried, LEAST_TRIED)
        self._ended = self._timed_out = 0

    def ended(self, *, timed_out: bool) -> None:
        self._timed_out += timed_out
        self._ended += 1

    @property
    def is_over(self) -> bool:
        return self._ended == self._timed_out >= self._tried

    @property
    def score(self) -> Score:
        """The score of each call that is given up."""
        reason = f"not called, because the first {self._timed_out} calls of the step returned nothing in time"
        return Score(RolloutStatus.REWARD_TIMEOUT, None, reason)


Key = tuple[int, int]  # of a completion: place of its task in the step, sibling


class ScoringRound(Protocol):
    """Completions that are being scored. Leaving the context abandons those that have no score yet.

    times: how long the rewards took, after `finish`; None for a scorer that uses the engine's device."""

    times: RewardTimes | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Abandon completions without a score."""
        return None

    def submit(self, key: Key, task: Task, completion_text: str, /) -> None:
        """Add a completion. Does not wait."""

    def advance(self) -> None:
        """Read scores and start further calls. Does not wait."""
        return None

    def so_far(self) -> dict[Key, Score]:
        """The scores that have arrived. Does not wait."""

    @property
    def is_done(self) -> bool:
        """Whether `finish` need not wait, or begins the work itself."""

    def finish(self) -> dict[Key, Score]:
        """The scores of all completions."""


class BatchScorer(Protocol):
    """A scorer: RewardWorkers, FunctionRewards, Judge, or workers with a reward model."""

    def score(self, completions: Sequence[tuple[Task, str]], /) -> list[Score]: ...


class OpenScorer(BatchScorer, Protocol):
    """A scorer with processes, threads or connections of its own: RewardWorkers, FunctionRewards or Judge."""

    def close(self) -> None: ...


@runtime_checkable
class ConcurrentScorer(Protocol):
    """A scorer that can score while the engine samples."""

    def begin(self) -> ScoringRound: ...


@runtime_checkable
class RestartingScorer(Protocol):
    """A scorer with processes of its own that are replaced after a crash or a time-out."""

    @property
    def restarts(self) -> int:
        """Processes that were replaced since the run began."""


def begin_round(scorer: BatchScorer) -> ScoringRound:
    """A round of `scorer`. One at a time."""
    return scorer.begin() if isinstance(scorer, ConcurrentScorer) else RoundAtTheEnd(scorer)


def score_all(opened: ScoringRound, completions: Sequence[tuple[Task, str]]) -> list[Score]:
    """The score of each (task, completion text), in their order, by a round that has just begun."""
    with opened as scoring:
        for number, (task, text) in enumerate(completions):
            scoring.submit((number, 0), task, text)
        scores = scoring.finish()
    return [scores[number, 0] for number in range(len(completions))]


class RoundAtTheEnd(ScoringRound):
    """Scores all completions in one call. `times`: measures it."""

    is_done = True

    def __init__(self, scorer: BatchScorer, *, times: bool = False) -> None:
        self._scorer = scorer
        self.times = RewardTimes() if times else None
        self._completions: dict[Key, tuple[Task, str]] = {}

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        self._completions[key] = (task, completion_text)

    def so_far(self) -> dict[Key, Score]:
        return {}

    def finish(self) -> dict[Key, Score]:
        keys, began = sorted(self._completions), time.monotonic()
        scores = self._scorer.score([self._completions[key] for key in keys])
        if self.times is not None:
            self.times = RewardTimes(waited=time.monotonic() - began)
        return dict(zip(keys, scores, strict=True))
