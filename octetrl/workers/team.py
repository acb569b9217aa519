"""The teams that a run's `Workers` call, their deadlines, and what shows the progress of a call.

    Team          verbs with the results of all workers: all that learning needs
    LocalTeam     one worker in this process: a verb is a method of it, nothing is sent
    ProcessTeam   processes, which also answer calls that nobody waits for; workers/ray.py has one on Ray
    PartOfTeam    some workers of a ProcessTeam

**Deadlines.** How long a phase may take on a worker, and the error of a worker that is lost. The limit of a phase
follows from its usual length: `times_usual` the longest so far, and at least `least_seconds`. A phase that has not been
measured has `first_seconds`, as it may compile kernels or load weights; one that computes nothing has `least_seconds`.

**Progress.** A micro-batch counts as done when its backward has been launched. On a GPU the device is then at most a
few kernels behind. A critic's micro-batches are not counted: they follow those of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from octetrl.config.cluster import DeadlineConfig
from octetrl.records import GenerationProgress, GenerationRequest, OnProgress, PackedBatch
from octetrl.system.errors import RunFailed
from octetrl.telemetry.console import Console
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.trainer import Trainer
from octetrl.workers.build import BuiltWorker

QUICK = ("state", "submit")  # phases that compute nothing


class WorkerLost(RunFailed):
    """A worker died, stalled or took too long. The run may go on with new workers, from its last checkpoint."""


class Team(Protocol):
    """Workers 0 to `size` - 1. A verb is a method of each (worker.py, hosted.py); `phase` names its deadline.

    Everything that waits raises WorkerLost for a worker that died, stalled or took longer than its phase may, and
    otherwise what the verb raised.
    """

    @property
    def size(self) -> int: ...

    @property
    def host(self) -> str:
        """Address of this machine, as the workers reach it."""

    def place(self, worker: int, /) -> str:
        """Number, host and GPU of a worker, for messages."""

    def ask(self, phase: str, verb: str, /, *arguments: Any) -> list[Any]:
        """The results of all workers for the same arguments."""

    def ask_each(self, phase: str, verb: str, arguments: Sequence[tuple[Any, ...]], /) -> list[Any]:
        """The results of all workers, each for its own arguments."""

    def ask_one(self, worker: int, phase: str, verb: str, /, *arguments: Any) -> Any:
        """The result of one worker."""

    def close(self) -> None:
        """Ends all processes. A second call does nothing."""


class LocalTeam:
    """The worker of this process, which is built already. `console` shows the micro-batches of a `train` call."""

    size, host = 1, "127.0.0.1"

    def __init__(self, built: BuiltWorker, console: Console) -> None:
        self.built, self._console = built, console

    def place(self, worker: int) -> str:
        return "the worker of this process"

    def ask(self, phase: str, verb: str, *arguments: Any) -> list[Any]:
        return [self.ask_one(0, phase, verb, *arguments)]

    def ask_each(self, phase: str, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self.ask_one(0, phase, verb, *arguments[0])]

    def ask_one(self, worker: int, phase: str, verb: str, *arguments: Any) -> Any:
        if verb == "train":
            with self._console.phase(phase) as show, counted(self.built.worker.trainer, arguments[0], show):
                return self.built.worker.train(*arguments)
        return self.built.verb(verb)(*arguments)

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a worker that was begun. `reference`: what the team waits for."""

    worker: int
    reference: Any


class ProcessTeam(Team, Protocol):
    """A team of processes: a verb is a method of `HostedWorker` (hosted.py), and calls may run beside one another."""

    def ask(self, phase: str, verb: str, /, *arguments: Any) -> list[Any]:
        return self.ask_each(phase, verb, [arguments] * self.size)

    def ask_each(self, phase: str, verb: str, arguments: Sequence[tuple[Any, ...]], /) -> list[Any]:
        return self.collect(phase, [self.begin(worker, verb, *each) for worker, each in enumerate(arguments)])

    def ask_one(self, worker: int, phase: str, verb: str, /, *arguments: Any) -> Any:
        return self.collect(phase, [self.begin(worker, verb, *arguments)])[0]

    def collect(self, phase: str, calls: Sequence[Call], /) -> list[Any]:
        """The results of calls that were begun, one of each worker, in their order."""

    def begin(self, worker: int, verb: str, /, *arguments: Any) -> Call:
        """Starts a call and waits for nothing."""

    def wait_any(self, calls: Sequence[Call], seconds: float, /) -> list[Call]:
        """The calls that have ended: as soon as one has, or none after `seconds`."""

    def result(self, call: Call, /) -> Any:
        """The result of a call that has ended."""

    def lose(self, worker: int, phase: str, seconds: float, why: str, /) -> Exception:
        """The WorkerLost of a worker that took too long, by the caller's clock."""


class PartOfTeam(ProcessTeam):
    """Some workers of a team, as a team: those that train, those that draw, or the first of each group that shares a
    model. Worker i of it is `members[i]` of `team`."""

    def __init__(self, team: ProcessTeam, members: Sequence[int]) -> None:
        self._team, self._members = team, members

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def host(self) -> str:
        return self._team.host

    def place(self, worker: int) -> str:
        return self._team.place(self._members[worker])

    def collect(self, phase: str, calls: Sequence[Call]) -> list[Any]:
        return self._team.collect(phase, [self._theirs(call) for call in calls])

    def begin(self, worker: int, verb: str, *arguments: Any) -> Call:
        return replace(self._team.begin(self._members[worker], verb, *arguments), worker=worker)

    def wait_any(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        theirs = [self._theirs(call) for call in calls]
        ended = {id(one) for one in self._team.wait_any(theirs, seconds)}
        return [call for call, one in zip(calls, theirs, strict=True) if id(one) in ended]

    def result(self, call: Call) -> Any:
        return self._team.result(self._theirs(call))

    def lose(self, worker: int, phase: str, seconds: float, why: str) -> Exception:
        return self._team.lose(self._members[worker], phase, seconds, why)

    def close(self) -> None:
        self._team.close()

    def _theirs(self, call: Call) -> Call:
        return replace(call, worker=self._members[call.worker])


class Deadlines:
    """The limits of a run's phases, by name."""

    def __init__(self, config: DeadlineConfig) -> None:
        self.config = config
        self._longest: dict[str, float] = {}

    def limit(self, phase: str) -> float:
        """Seconds that this phase may take now."""
        longest = self._longest.get(phase)
        if longest is None:
            return self.config.least_seconds if phase in QUICK else self.config.first_seconds
        return max(self.config.least_seconds, self.config.times_usual * longest)

    def took(self, phase: str, seconds: float) -> None:
        self._longest[phase] = max(seconds, self._longest.get(phase, 0.0))


def num_micro_batches(batch: PackedBatch, epochs: int) -> int:
    """The micro-batches of a `train` call, over all its passes."""
    return epochs * sum(map(len, batch.minibatches))


@contextmanager
def counted(trainer: Trainer | RewardTrainer, batch: PackedBatch, show: Callable[[int, int], None]) -> Iterator[None]:
    """Within, `show(done, total)` is called after each micro-batch of `trainer.train(batch)`."""
    inner = trainer.scalar_trainer if isinstance(trainer, RewardTrainer) else trainer
    gradients, total, done = inner.optimizer.gradients, num_micro_batches(batch, trainer.config.epochs), 0

    def count() -> None:
        nonlocal done
        done += 1
        show(min(done, total), total)

    gradients.on_micro_batch = count
    try:
        yield
    finally:
        gradients.on_micro_batch = None


@contextmanager
def rollout_shown(console: Console, most: int | None = None) -> Iterator[OnProgress]:
    """The console's phase of a rollout; its callback shows how far the rollout is. most: tokens, None: not known."""
    with console.phase("rollout") as show:

        def on_progress(progress: GenerationProgress) -> None:
            show(progress.done, progress.total, progress.generated_tokens, most)

        yield on_progress


def most_tokens(requests: Sequence[GenerationRequest]) -> int:
    """As many as the answers to `requests` may have."""
    return sum(request.num_siblings * request.sampling.max_new_tokens for request in requests)
