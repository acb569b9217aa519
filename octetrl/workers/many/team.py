"""What the driver needs of the processes that hold its workers. workers/ray.py has them on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a worker that was begun. `reference`: what the team waits for."""

    worker: int
    reference: Any


class Team(Protocol):
    """Workers 0 to `size` - 1. Each verb is a method of `HostedWorker` (hosted.py).

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

    def begin(self, worker: int, verb: str, /, *arguments: Any) -> Call:
        """Starts a call and waits for nothing."""

    def wait_any(self, calls: Sequence[Call], seconds: float, /) -> list[Call]:
        """The calls that have ended: as soon as one has, or none after `seconds`."""

    def result(self, call: Call, /) -> Any:
        """Of a call that has ended."""

    def lose(self, worker: int, phase: str, seconds: float, why: str, /) -> Exception:
        """The WorkerLost of a worker that took too long, by the caller's clock."""

    def close(self) -> None:
        """Ends all processes. A second call does nothing."""
