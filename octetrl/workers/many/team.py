"""Teams of processes: calls beside one another, parts of a team, deadlines. workers/ray.py has one on Ray.

**Deadlines.** How long a phase may take on a worker, and the error of a worker that is lost.

The limit of a phase follows from its usual length: `times_usual` the longest so far, and at least `least_seconds`. A
phase that has not been measured has `first_seconds`, as it may compile kernels or load weights; one that computes
nothing has `least_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from octetrl.config.cluster import DeadlineConfig
from octetrl.system.errors import RunFailed
from octetrl.workers.team import Team


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a worker that was begun. `reference`: what the team waits for."""

    worker: int
    reference: Any


class ProcessTeam(Team, Protocol):
    """A team of processes: a verb is a method of `HostedWorker` (hosted.py), and calls may run beside one another."""

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


class PartOfTeam:
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

    def ask(self, phase: str, verb: str, *arguments: Any) -> list[Any]:
        return self.ask_each(phase, verb, [arguments] * self.size)

    def ask_each(self, phase: str, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.collect(phase, [self.begin(worker, verb, *each) for worker, each in enumerate(arguments)])

    def ask_one(self, worker: int, phase: str, verb: str, *arguments: Any) -> Any:
        return self._team.ask_one(self._members[worker], phase, verb, *arguments)

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


QUICK = ("state", "submit")


class WorkerLost(RunFailed):
    """A worker died, stalled or took too long. The run may go on with new workers, from its last checkpoint."""


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
