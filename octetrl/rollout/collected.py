"""The groups that a step collected, with their metrics; and what a collection keeps while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octetrl.records import RolloutGroup
from octetrl.rollout.backend import SessionRecord
from octetrl.rollout.drive import Occupancy
from octetrl.rollout.expected_lengths import ExpectedLengths


@dataclass(slots=True)
class Collecting:
    """What one collection keeps while it runs: a step's with all its refills, or an evaluation's."""

    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    on_group: Callable[[int, RolloutGroup], None] | None = None  # gets each scored group's place and the group, early
    first_place: int = 0  # in the step, of the next task: seeds follow from it
    occupancy: Occupancy = field(default_factory=Occupancy)  # filled where an environment has several turns
    session: SessionRecord | None = None  # of all sessions so far, as one

    def end_session(self, record: SessionRecord) -> None:
        self.session = record if self.session is None else self.session.followed_by(record)


@dataclass(frozen=True, slots=True)
class CollectedBatch:
    """The groups that a step collected."""

    groups: list[RolloutGroup]  # all of them, in the order drawn
    kept: list[RolloutGroup]
    refills: int
    occupancy: Occupancy = field(default_factory=Occupancy)
    reward_restarts: int = 0  # reward processes that were replaced
    of_order: Mapping[str, float] = field(default_factory=dict)  # metrics of the order of the tasks
    session: SessionRecord | None = None  # None: nothing could be sampled
    reward_times: Mapping[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> Mapping[str, float]:
        """Metrics of the groups."""
        counts = {
            "groups": len(self.groups),
            "kept_groups": len(self.kept),
            "refills": self.refills,
            "reward_restarts": self.reward_restarts,
        }
        metrics = {f"rollout/{name}": float(count) for name, count in counts.items()}
        return {**metrics, **self.occupancy.metrics, **self.of_order}

    @property
    def measured(self) -> Mapping[str, float]:
        """Metrics of the engines and the clock."""
        return {**({} if self.session is None else self.session.named()), **self.reward_times}

    @property
    def metrics(self) -> Mapping[str, float]:
        return {**self.counts, **self.measured}
