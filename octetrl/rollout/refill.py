"""A step's groups, drawn until enough of them teach something (DAPO's dynamic sampling, arXiv 2503.14476).

    draw `prompts` tasks
    while fewer than `prompts` groups are kept, `max_refills` times at most:
        draw as many tasks as should give the missing ones by the share kept so far, at most `prompts`

What a step draws is in its taskset's state, so a resumed run goes on after it. More groups than `prompts` may be kept,
by what the last draw gave too many: they are learnt from. With `max_refills` 0 it is one draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from octetrl.environments.scoring import RewardWorkers
from octetrl.environments.turns.dialogue import Dialogue
from octetrl.records import RolloutGroup, Task
from octetrl.rollout.collect import Collection, Generates, Scores, collect_groups
from octetrl.rollout.drive import Occupancy


class Tasks(Protocol):
    """What gives tasks: `Taskset` (environments/base.py)."""

    def next_batch(self, n: int, /) -> list[Task]: ...


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step drew."""

    groups: list[RolloutGroup]  # all of them, in the order drawn
    kept: list[RolloutGroup]
    refills: int
    occupancy: Occupancy = field(default_factory=Occupancy)
    reward_restarts: int = 0  # reward processes that were replaced

    @property
    def metrics(self) -> Mapping[str, float]:
        counts = {
            "groups": len(self.groups),
            "kept_groups": len(self.kept),
            "refills": self.refills,
            "reward_restarts": self.reward_restarts,
        }
        return {f"rollout/{name}": float(count) for name, count in counts.items()} | dict(self.occupancy.metrics)


def collect_batch(
    tasks: Tasks,
    keeps: Callable[[RolloutGroup], bool],
    environment: Scores | Dialogue,
    workers: Generates,
    collection: Collection,
) -> Collected:
    """At least `collection.prompts` groups that are kept, or as many as `collection.max_refills` gave."""
    groups: list[RolloutGroup] = []
    kept: list[RolloutGroup] = []
    wanted, draws, occupancy = collection.prompts, 0, Occupancy()
    restarts = _reward_restarts(environment)
    while wanted > 0 and draws <= collection.max_refills:
        drawn = tasks.next_batch(wanted)
        new = collect_groups(
            drawn, environment, workers, replace(collection, first_place=len(groups), occupancy=occupancy)
        )
        groups += new
        kept += [group for group in new if keeps(group)]
        draws += 1
        missing = max(collection.prompts - len(kept), 0)
        wanted = min(-(-missing * len(groups) // max(len(kept), 1)), collection.prompts)
    return Collected(groups, kept, draws - 1, occupancy, _reward_restarts(environment) - restarts)


def _reward_restarts(environment: Scores | Dialogue) -> int:
    """Since the run began."""
    scorer = environment.scorer if isinstance(environment, Dialogue) else environment
    return scorer.restarts if isinstance(scorer, RewardWorkers) else 0
