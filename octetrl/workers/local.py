"""One worker in this process: the embedded default, on a CPU or one GPU.

It follows protocol.py by calling its `Worker` directly, and shows progress on the console.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octetrl.environments.scoring import Score
from octetrl.records import (
    Completion,
    EarlierAnswer,
    GenerationRequest,
    OnCompletions,
    PackedBatch,
    PolicyUpdate,
    Published,
    Task,
)
from octetrl.rollout.backend import MeasuredSession, OnSession, not_asked
from octetrl.telemetry.console import Console
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.packing import PackingLayout
from octetrl.workers.reward_model_worker import RewardModelWorker
from octetrl.workers.reward_scorer import RewardModelScorer
from octetrl.workers.training_progress import counted, most_tokens, rollout_shown
from octetrl.workers.worker import Worker, remember


class LocalLearningWorkers:
    """`LearningWorkers` on one worker: a policy's or a reward model's."""

    def __init__(self, worker: Worker | RewardModelWorker, console: Console) -> None:
        self.worker: Worker | RewardModelWorker = worker
        self._console = console

    @property
    def layout(self) -> PackingLayout:
        return self.worker.layout

    @property
    def policy_version(self) -> int:
        return self.worker.policy_version

    @property
    def weights_are_whole(self) -> bool:
        return self.worker.weights_are_whole

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        with self._console.phase("train") as show, counted(self.worker.trainer, batch, show):
            return self.worker.train(batch)

    def publish(self, policy_version: int) -> Published:
        with self._console.phase("publish"):
            return self.worker.publish(policy_version)

    def prepare_saving(self) -> None:
        self.worker.prepare_saving()

    def copy_state(self) -> str | None:
        return self.worker.copy_state()

    def write_state(self, folder: Path, *, copied: bool) -> list[WrittenFile]:
        return self.worker.write_state(folder, copied=copied)

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        self.worker.load(saved, policy_version)

    def close(self) -> None:
        """Nothing to end."""


class LocalWorkers(LocalLearningWorkers):
    """`Workers` on one worker. `scorer`: the model that scores completions, if the recipe has one."""

    def __init__(self, worker: Worker, console: Console, scorer: RewardModelScorer | None = None) -> None:
        super().__init__(worker, console)
        self._policy, self._scorer = worker, scorer

    @property
    def needs_calibration(self) -> bool:
        return self._policy.needs_calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> dict[str, float]:
        with self._console.phase("calibrate"):
            return self._policy.calibrate(token_lists)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
    ) -> list[list[Completion]]:
        with rollout_shown(self._console, most_tokens(requests)) as on_progress:
            return self._policy.generate(requests, on_progress, on_completions, on_end)

    @contextmanager
    def session(self, on_end: OnSession = not_asked) -> Iterator[MeasuredSession]:
        with rollout_shown(self._console) as on_progress, self._policy.session(on_progress, on_end) as session:
            yield session

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        assert self._scorer is not None, "the recipe has no environment.reward_model"
        return self._scorer.score(completions)

    def remember(self, answers: Sequence[EarlierAnswer]) -> None:
        remember(self._policy, answers)

    def forget_prefixes(self) -> None:
        self._policy.forget_prefixes()
