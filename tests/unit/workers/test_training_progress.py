"""The micro-batches of a `train` call are counted while it runs, on each kind of worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.workers.status import StatusReport, WorkerStatus
from octetrl.workers.team import counted, num_micro_batches
from tests.unit.trainer.tiny_trainer import random_samples, tiny_trainer


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 3)])
def test_every_micro_batch_counts_once(epochs: int, minibatches: int) -> None:
    trainer = tiny_trainer(tokens_per_micro_batch=32, epochs=epochs, minibatches=minibatches)
    batch = pack(random_samples(9), trainer.layout, trainer.algorithm.token_weighting)
    shown: list[tuple[int, int]] = []
    with counted(trainer, batch, lambda done, total: shown.append((done, total))):
        trainer.train(batch, KVReplay(), None)
    total = num_micro_batches(batch, epochs)
    assert total > 3 and shown == [(done, total) for done in range(1, total + 1)]
    trainer.train(batch, KVReplay(), None)
    assert len(shown) == total, "nobody looks any more"


def test_a_workers_line_says_how_far_it_is() -> None:
    status = WorkerStatus(0, "gpu1", "3", 77, "train", 12.0, True, 61.25, done=3, total=8)
    line = "worker 0 (host gpu1, GPU 3): train for 12 s (3/8 micro-batches), 61.2 GB, process 77"
    assert StatusReport(status, 0.0).line == line
    loaded = replace(status, read_gb=4.123, quantized_gb=3.5)
    assert StatusReport(loaded, 0.0).line == line + ", read 4.1 GB and quantised 3.5 GB of weights"
    small = replace(status, read_gb=0.041, quantized_gb=0.033)
    assert StatusReport(small, 0.0).line == line + ", read 41 MB and quantised 33 MB of weights"
