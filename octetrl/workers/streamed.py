"""One update of a worker whose batch arrives in parts (trainer/streamed.py), with what `Worker.train` does besides."""

from __future__ import annotations

from dataclasses import replace

from octetrl.records import PackedBatch, PolicyUpdate, joined
from octetrl.trainer.streamed import StreamedCall
from octetrl.workers.worker import Worker


class StreamedUpdate:
    """`divisor`: of the loss, until its denominator is known. The caller frees the KV cache's memory before the first
    part (`Worker.free_cache`)."""

    def __init__(self, worker: Worker, divisor: float) -> None:
        self._worker, self._call = worker, StreamedCall(worker.trainer, divisor)
        self._took: dict[str, float] = {}  # by the parts so far

    def add(self, part: PackedBatch) -> None:
        """Trains on some micro-batches, without other workers."""
        worker = self._worker
        with worker.clock("train") as took:
            self._call.add(part, worker.replay(part.policy_version), worker.policy.digest)
        self._took = joined(self._took, took)

    def finish(self, whole: PackedBatch) -> PolicyUpdate:
        """The update with all workers; the metrics are those of all. `whole`: without its micro-batches."""
        own = replace(whole, minibatches=(tuple(self._call.micro_batches),))
        update = self._worker.train(own, self._call.finish)
        return replace(update, metrics=joined(update.metrics, self._took))
