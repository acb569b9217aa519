"""The settings that a worker process receives when it starts, and the status that it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octetrl.config.schema import Recipe
from octetrl.records import GenerationProgress, SessionEvent
from octetrl.rollout.backend import SessionRecord
from octetrl.workers.build import BuiltWorker, build_worker
from octetrl.workers.many.assignment import Said

BuildWorker = Callable[..., BuiltWorker]


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """All that a worker is built from. Its process must see the files that the recipe names."""

    recipe: Recipe
    rank: int
    count: int
    trains: bool
    directory: str  # in which the recipe's relative paths begin
    log: str | None  # file for what the process prints; None: where Ray puts it
    build: BuildWorker = build_worker  # another function with its arguments, for a bench
    modules: tuple[str, ...] = ()  # folders in which modules of the recipe are found, such as the recipe's own

    @property
    def role(self) -> str:
        """trains or generates; empty: it does both, as all do outside training."""
        roles = self.recipe.cluster.roles
        if roles is None or not self.trains:
            return ""
        return "trains" if self.rank < roles[0] else "generates"


@dataclass(frozen=True, slots=True)
class SessionNews:
    """Events of a worker's session since the last poll."""

    events: Sequence[SessionEvent]
    progress: GenerationProgress | None
    pages_in_use: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What an open session of a worker leaves, closed before its answers have ended."""

    answers: Mapping[tuple[str, int], Said]  # of each unfinished one, what it has said; by request and sibling
    events: Sequence[SessionEvent]  # since the last poll
    record: SessionRecord
