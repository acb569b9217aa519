"""`Run`: all objects that a step needs. `build.py` builds it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, cast

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.data.mixture import Mixture
from octetrl.data.tokenizer import Tokenizer
from octetrl.environments.base import Taskset
from octetrl.rollout.collection_settings import CollectionSettings
from octetrl.run.batches_ahead import BufferedBatch, DataPlace
from octetrl.run.environment_parts import Rewards
from octetrl.run.journal import Journal
from octetrl.telemetry.console import Console
from octetrl.telemetry.metrics import StepMetrics
from octetrl.telemetry.spans import Spans
from octetrl.workers.protocol import LearningWorkers, Workers


class StepMethod(Protocol):
    """A way to run a step (beside_tail.py, ahead.py)."""

    def step(self) -> StepMetrics: ...


class BatchesAhead(StepMethod, Protocol):
    """A step with batches that were drawn ahead; ahead.py describes these verbs."""

    @property
    def place(self) -> DataPlace: ...
    def batches_after(self, step: int, *, waits: bool) -> list[BufferedBatch]: ...
    def put_back(self, batches: Sequence[BufferedBatch], step: int) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Run:
    """All objects that a step needs. `step` is the number of the current step, from 1."""

    config: Recipe
    tokenizer: Tokenizer
    taskset: Taskset
    conversations: Mixture | None  # or preference pairs; None: rollouts
    rewards: Rewards
    algorithm: Algorithm
    workers: LearningWorkers
    journal: Journal
    console: Console
    spans: Spans
    base_collection: CollectionSettings
    step: int = field(default=0)
    ahead: BatchesAhead | None = None  # None: a step generates, then learns
    beside_tail: StepMethod | None = None  # it learns from complete groups while the last answers are sampled

    @property
    def rollout_workers(self) -> Workers:
        """The workers, typed as workers that generate. A reward model's run has none and never calls this."""
        assert self.algorithm.reward_loss is None, "these workers sample no rollouts"
        return cast(Workers, self.workers)

    @property
    def collection(self) -> CollectionSettings:
        """Settings for collecting this step's groups. The seeds follow from the step."""
        return self.base_collection.at_step(self.step)

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.rewards.close()
        self.workers.close()
