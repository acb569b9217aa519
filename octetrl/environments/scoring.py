"""Rewards, each computed in a process that can be killed.

`RewardWorkers` keeps a few child processes (`environments/process.py`) with the environment's `score` loaded
and hands each one completion at a time, so that the time of one call is known and one hang costs one worker.
What comes back is never a silent 0:

    a finite number                         SCORED, reward = float(value)
    a raise, a crash, NaN, None, a string   REWARD_ERROR, reward None, the error's text and line as detail
    no answer after `timeout_seconds`       REWARD_TIMEOUT, reward None; the worker is killed and replaced

Cost: 0.13 ms a completion over the score itself. A replaced worker imports the scorer's libraries anew
(a second for reasoning_gym) while the others go on; batching calls, or forking from a warm process, would
save that at the price of clear deadlines.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType

from octetrl.config.errors import UserError
from octetrl.environments.base import Scorer, finite_number
from octetrl.environments.process import Answer, CallableProcess, ProcessDied
from octetrl.records import RolloutStatus, Task


@dataclass(frozen=True, slots=True)
class Score:
    """Of one completion. `reward` is None unless `status` is SCORED; `detail` is then None, or the scorer's word."""

    status: RolloutStatus
    reward: float | None
    detail: str | None = None
    trace: str | None = None  # the traceback behind `detail`, where there is one
    answered: str | None = None  # what was answered, from a scorer that says so


class Explained(float):
    """A reward with a word on why it is what it is. Rollouts show it as their detail."""

    detail: str | None

    def __new__(cls, reward: float, detail: str | None = None) -> Explained:
        made = super().__new__(cls, reward)
        made.detail = detail
        return made


@dataclass(frozen=True, slots=True)
class CheckedScorer:
    """`scorer`, made to raise when its reward is no number, or too large, and what it read as the answer, if it has
    `answered(task, completion_text) -> str | None`. Runs in the worker."""

    scorer: Scorer

    def __call__(self, task: Task, completion_text: str) -> tuple[float, str | None, str | None]:
        reward = self.scorer(task, completion_text)
        number = finite_number(reward, "reward")
        answered = getattr(getattr(self.scorer, "__self__", self.scorer), "answered", None)
        detail = reward.detail if isinstance(reward, Explained) else None
        return number, None if answered is None else answered(task, completion_text), detail


class RewardWorkers:
    """`processes` child processes that hold `scorer`; use as a context manager, or `close` it.

    scorer: picklable `(task, completion_text) -> float`, such as `environment.score`.
    Raises UserError at once when a worker can't load the scorer. One caller at a time.
    """

    def __init__(self, scorer: Scorer, *, timeout_seconds: float, processes: int = 1) -> None:
        self._scorer = CheckedScorer(scorer)
        self._timeout = timeout_seconds
        self._workers = [self._start() for _ in range(processes)]
        self._greet(self._workers[0])

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        scores: dict[int, Score] = {}
        queue = deque(enumerate(completions))
        running: dict[CallableProcess, tuple[int, float]] = {}  # worker -> index, deadline
        try:
            while queue or running:
                for worker in [worker for worker in self._workers if worker.is_ready and worker not in running]:
                    if queue:
                        self._begin(worker, queue, running)
                for worker in self._wait(running):
                    if worker in running:
                        index, _ = running.pop(worker)
                        scores[index] = self._finish(worker)
                    else:
                        self._greet(worker)
                for worker in [worker for worker, (_, end) in running.items() if end <= time.monotonic()]:
                    index, _ = running.pop(worker)
                    self._replace(worker)
                    text = f"no reward after {self._timeout:g} s; raise environment.reward_timeout_seconds"
                    scores[index] = Score(RolloutStatus.REWARD_TIMEOUT, None, text)
        finally:
            for worker in running:  # interrupted: a late answer must not be taken for that of the next call
                self._replace(worker)
        return [scores[index] for index in range(len(completions))]

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> RewardWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> CallableProcess:
        try:
            return CallableProcess(self._scorer)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"environment: the reward can't be sent to a process of its own ({error});"
                " define it at the top level of a module"
            ) from error

    def _greet(self, worker: CallableProcess) -> None:
        """Take the greeting of a worker that starts. Raises UserError when it could not load the scorer."""
        try:
            greeting = worker.receive()
        except ProcessDied as error:
            greeting = Answer(error=str(error))
        if greeting.error is not None:
            self.close()
            raise UserError(
                f"environment: a reward process could not load the reward ({greeting.error});"
                " define it at the top level of a module that imports from the working directory"
            )

    def _begin(
        self,
        worker: CallableProcess,
        queue: deque[tuple[int, tuple[Task, str]]],
        running: dict[CallableProcess, tuple[int, float]],
    ) -> None:
        index, (task, text) = queue[0]
        try:
            worker.send(task, text)
        except ProcessDied:  # while it was idle, so the completion is not to blame
            self._replace(worker)
            return
        queue.popleft()
        running[worker] = (index, time.monotonic() + self._timeout)

    def _wait(self, running: dict[CallableProcess, tuple[int, float]]) -> list[CallableProcess]:
        """Workers that have something to say, or none when the first deadline is reached."""
        awaited = {worker.connection: worker for worker in self._workers if worker in running or not worker.is_ready}
        deadlines = [end for _, end in running.values()]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        return [awaited[connection] for connection in wait(list(awaited), timeout)]  # type: ignore[index]

    def _finish(self, worker: CallableProcess) -> Score:
        try:
            answer = worker.receive()
        except ProcessDied as error:
            self._replace(worker)
            answer = Answer(error=str(error))
        if answer.error is not None:
            return Score(RolloutStatus.REWARD_ERROR, None, answer.error, answer.trace)
        reward, answered, detail = answer.value
        return Score(RolloutStatus.SCORED, reward, detail, answered=answered)

    def _replace(self, worker: CallableProcess) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = self._start()
