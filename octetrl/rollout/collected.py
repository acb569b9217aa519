"""The groups that a step collected, with their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octetrl.records import RolloutGroup, Task
from octetrl.rollout.drive import Occupancy


@dataclass(frozen=True, slots=True)
class CollectedBatch:
    """The groups that a step collected."""

    groups: list[RolloutGroup]  # all of them, in the order drawn
    kept: list[RolloutGroup]
    refills: int
    occupancy: Occupancy = field(default_factory=Occupancy)
    reward_restarts: int = 0  # reward processes that were replaced
    of_order: Mapping[str, float] = field(default_factory=dict)  # metrics of the order of the tasks
    put_back: tuple[Task, ...] = ()  # whose groups were too slow and are left out (overdraw.py)
    of_overdraw: Mapping[str, float] = field(default_factory=dict)  # metrics of that

    @property
    def metrics(self) -> Mapping[str, float]:
        counts = {
            "groups": len(self.groups),
            "kept_groups": len(self.kept),
            "refills": self.refills,
            "reward_restarts": self.reward_restarts,
        }
        metrics = {f"rollout/{name}": float(count) for name, count in counts.items()}
        return {**metrics, **self.occupancy.metrics, **self.of_order, **self.of_overdraw}
