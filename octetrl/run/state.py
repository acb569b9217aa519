"""`Run`: all objects that a step needs, built once (build.py), and the interface of the ways to take a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.data.mixture import Mixture
from octetrl.data.tokenizer import Tokenizer
from octetrl.environments.scoring import RewardTimes
from octetrl.environments.tasks import Taskset
from octetrl.records import RolloutGroup
from octetrl.rollout.collect import CollectionSettings, ExpectedLengths
from octetrl.run.device import random_state, restore_random_state
from octetrl.run.environment import Rewards
from octetrl.run.folder.journal import Journal, check_failures
from octetrl.telemetry.console import Console
from octetrl.workers.workers import Workers


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives. `groups`: all that it sampled, with those that it did not train on; none without rollouts."""

    metrics: Mapping[str, float]
    groups: Sequence[RolloutGroup] = ()
    evaluated: Sequence[RolloutGroup] = ()  # of held-out tasks, where an evaluation was due after the step
    reward_times: RewardTimes | None = None  # None: nothing measured them

    def check_failures(self, recipe: Recipe, step: int) -> None:
        """Raises RunFailed if more rollouts of the step, or of its evaluation, failed than the recipe allows."""
        check_failures(recipe, self.groups, f"step {step}")
        check_failures(recipe, self.evaluated, f"evaluation after step {step}")


@dataclass(frozen=True, slots=True)
class DataPlace:
    """The state of the tasks, the lengths of answers and the global random generators after a batch. An environment may
    draw from the generators, so the next batch depends on them."""

    taskset: Mapping[str, Any]
    lengths: Mapping[str, Any]
    random: Mapping[str, Any]

    @classmethod
    def of(cls, taskset: Taskset, lengths: ExpectedLengths) -> DataPlace:
        return cls(taskset.state(), lengths.state(), random_state())

    def put_into(self, taskset: Taskset, lengths: ExpectedLengths, *, has_changed: bool = False) -> None:
        """has_changed: whether the tasks may differ from those of then."""
        taskset.restore(self.taskset, has_changed=has_changed)
        lengths.restore(self.lengths)
        restore_random_state(self.random)


@dataclass(frozen=True, slots=True)
class BufferedBatch:
    """A batch that was generated ahead of its step: the groups, sampled and scored, and what else the step needs."""

    groups: tuple[RolloutGroup, ...]  # all, in the order drawn
    kept: tuple[RolloutGroup, ...]  # of these
    counts: Mapping[str, float]  # metrics of the groups
    metrics: Mapping[str, float]  # of the engines and the clock
    place: DataPlace  # after it
    reward_times: RewardTimes | None = None  # a checkpoint has only their metrics

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled one of its answers; None: nothing was sampled."""
        turns = (turn for group in self.groups for rollout in group.rollouts for turn in rollout.turns)
        return min((turn.completion.policy_version for turn in turns), default=None)


class StepMethod(ABC):
    """A way to take a step: step.py has the plain ones, then beside_tail.py and ahead.py."""

    draws_ahead: ClassVar[bool] = False  # while an earlier step learns

    @abstractmethod
    def step(self, run: Run, number: int, journal: Journal) -> StepResult:
        """Step `number`, from 1. The journal writes its rollouts before they are learnt."""

    def place(self, run: Run) -> DataPlace:
        """The place in the tasks after the last batch that a step took."""
        return DataPlace.of(run.taskset, run.lengths)

    def batches_after(self, step: int, *, waits: bool) -> list[BufferedBatch]:
        """Batches that are sampled already, of the steps after `step`."""
        return []

    def put_back(self, run: Run, batches: Sequence[BufferedBatch], step: int) -> None:
        """Begins after `step` with the batches of a checkpoint, once the run's cursor has been restored."""
        lost = sum(len(batch.groups) for batch in batches)
        if lost:
            run.console.note(f"{lost} saved groups are sampled again, because cluster.max_staleness is 0 now")

    def paused(self) -> AbstractContextManager[dict[str, float]]:
        """Nothing is sampled meanwhile, and the engines have the last weights. Gives the metrics of the wait."""
        return nullcontext({})

    def close(self) -> None:  # noqa: B027
        """Ends what the method started. A second call does nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """All objects that a step needs."""

    config: Recipe
    tokenizer: Tokenizer
    taskset: Taskset
    conversations: Mixture | None  # or preference pairs; None: rollouts
    rewards: Rewards
    algorithm: Algorithm
    workers: Workers
    method: StepMethod
    console: Console
    collection: CollectionSettings
    lengths: ExpectedLengths  # of answers, learnt from step to step
    eval_rewards: Rewards | None = None  # None: `rewards` score the answers of evaluations too

    def close(self) -> None:
        self.method.close()
        self.rewards.close()
        if self.eval_rewards is not None:
            self.eval_rewards.close()
        self.workers.close()
