"""What a run's `Workers` need of the team that they call, and the team of one worker in this process.

Team          verbs with the results of all workers: all that learning needs
LocalTeam     one worker in this process: a verb is a method of it, nothing is sent
many/team.py  teams of processes, which also answer calls that nobody waits for; workers/ray.py has one on Ray
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from octetrl.telemetry.console import Console
from octetrl.workers.build import BuiltWorker
from octetrl.workers.training_progress import counted


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
