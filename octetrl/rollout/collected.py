"""What a collection of groups needs, keeps while it runs, and gives: settings, state, and groups with their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from octetrl.config.schema import RolloutConfig
from octetrl.records import Completion, GenerationRequest, OnCompletions, RolloutGroup, SamplingParams, Task
from octetrl.rollout.backend import OnSession, RolloutSession, SessionRecord, not_asked
from octetrl.rollout.chat_tokens import ChatTokens
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


class Tasks(Protocol):
    """A source of tasks: `Taskset` (environments/tasks.py)."""

    def next_batch(self, n: int, /) -> list[Task]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


class Generates(Protocol):
    """The generating part of a worker: a backend's first verbs (rollout/backend.py), with progress shown."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
        /,
    ) -> list[list[Completion]]: ...

    def session(self, on_end: OnSession = not_asked, /) -> AbstractContextManager[RolloutSession]: ...


class LengthPenalty(Protocol):
    """Penalty for an answer's length, 0 or less: `soft_overlong_penalty` (algorithms/dapo.py)."""

    def __call__(self, length: int, *, was_cut: bool) -> float: ...


@dataclass(frozen=True, slots=True)
class CollectionSettings:
    """Settings for the collection of groups, without the tasks."""

    chat: ChatTokens
    sampling: SamplingParams
    group_size: int
    max_prompt_tokens: int
    seed: int = 0
    step: int = 0  # new for every collection: seeds follow from it
    prompts: int = 1  # groups that a step wants (`collect_batch`)
    max_refills: int = 0  # further draws to get them
    penalty: LengthPenalty | None = None  # added to the reward for its length; None: none
    context_length: int = 1 << 30  # tokens that a conversation may have
    answer_limits: Callable[[Task], tuple[int, ...]] | None = (
        None  # of each sibling, for a bench; None: `sampling` has it
    )

    @classmethod
    def from_config(cls, chat: ChatTokens, config: RolloutConfig, *, seed: int) -> CollectionSettings:
        """Settings from the recipe's `rollout` section."""
        sampling = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            stop=config.stop,
        )
        return cls(
            chat,
            sampling,
            config.group_size,
            config.max_prompt_tokens,
            seed,
            prompts=config.prompts_per_step,
        )

    def at_step(self, step: int) -> CollectionSettings:
        return replace(self, step=step)
