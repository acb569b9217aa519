"""One worker in this process: the embedded default, on a CPU or one GPU.

The step talks to *workers*; here that is one `Worker`, called directly, with its progress shown on the console.
"""

from __future__ import annotations

from collections.abc import Sequence

from octetrl.engine.metrics import GenerationProgress
from octetrl.records import Completion, GenerationRequest, PackedBatch, PolicyUpdate, Published
from octetrl.run.worker import Worker
from octetrl.telemetry.console import Console
from octetrl.trainer.packing import PackingLayout


class LocalWorkers:
    """The verbs of a step on one worker."""

    def __init__(self, worker: Worker, console: Console) -> None:
        self.worker = worker
        self._console = console

    @property
    def layout(self) -> PackingLayout:
        return self.worker.layout

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        with self._console.phase("rollout") as show:

            def on_progress(progress: GenerationProgress) -> None:
                show(progress.done, progress.total, progress.generated_tokens)

            return self.worker.generate(requests, on_progress)

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        with self._console.phase("train"):
            return self.worker.train(batch)

    def publish(self, policy_version: int) -> Published:
        return self.worker.publish(policy_version)

    def rollout_metrics(self) -> dict[str, float]:
        """Of the last `generate`."""
        return self.worker.rollout_metrics()
