"""One worker in this process: the embedded default, on a CPU or one GPU.

The step, the loop and the checkpoints talk to *workers*, in verbs; here that is one `Worker`, called directly, with its
progress shown on the console. Another set of workers has these same verbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from octetrl.engine.session import Session
from octetrl.records import Completion, GenerationProgress, GenerationRequest, PackedBatch, PolicyUpdate, Published
from octetrl.telemetry.console import Console
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.packing import PackingLayout
from octetrl.workers.reward_model_worker import RewardModelWorker
from octetrl.workers.worker import Worker

AnyWorker = Worker | RewardModelWorker


class LocalWorkers:
    """The verbs of a run on one worker."""

    def __init__(self, worker: AnyWorker, console: Console) -> None:
        self.worker = worker
        self._console = console

    # ------------------------------------------------------------ of a step

    @property
    def layout(self) -> PackingLayout:
        return self.worker.layout

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        with self._console.phase("rollout") as show:

            def on_progress(progress: GenerationProgress) -> None:
                show(progress.done, progress.total, progress.generated_tokens)

            return self.worker.generate(requests, on_progress)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Requests may come while others run (engine/session.py)."""
        with self._console.phase("rollout") as show:

            def on_progress(progress: GenerationProgress) -> None:
                show(progress.done, progress.total, progress.generated_tokens)

            with self.worker.session(on_progress) as session:
                yield session

    def forget_prefixes(self) -> None:
        self.worker.forget_prefixes()

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        with self._console.phase("train"):
            return self.worker.train(batch)

    def publish(self, policy_version: int) -> Published:
        return self.worker.publish(policy_version)

    # ------------------------------------------------------------ before the first

    @property
    def needs_calibration(self) -> bool:
        return self.worker.needs_calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> None:
        self.worker.calibrate(token_lists)

    # ------------------------------------------------------------ of a checkpoint

    @property
    def policy_version(self) -> int:
        return self.worker.trainer.policy_version

    @property
    def weights_are_whole(self) -> bool:
        """False while an update is under way: such weights must not be saved."""
        return self.worker.trainer.weights_are_whole

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self.worker.state()

    def write_model(self, folder: Path) -> None:
        self.worker.write_model(folder)

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        self.worker.load(saved, policy_version)

    # ------------------------------------------------------------ what they measured

    def rollout_metrics(self) -> dict[str, float]:
        return self.worker.rollout_metrics()

    def path_metrics(self) -> dict[str, float]:
        return self.worker.path_metrics()

    def memory_metrics(self) -> dict[str, float]:
        return self.worker.memory_metrics()
