"""What is needed to show progress: the micro-batches of a `train` call that are done, the tokens that requests allow.

A micro-batch counts when its backward has been launched. On a GPU the device is then at most a few kernels behind. A
critic's micro-batches are not counted: they follow those of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octetrl.records import GenerationRequest, PackedBatch
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.trainer import Trainer


def num_micro_batches(batch: PackedBatch, epochs: int) -> int:
    """Of a `train` call, over all its passes."""
    return epochs * sum(map(len, batch.minibatches))


@contextmanager
def counted(trainer: Trainer | RewardTrainer, batch: PackedBatch, show: Callable[[int, int], None]) -> Iterator[None]:
    """Within, `show(done, total)` is called after each micro-batch of `trainer.train(batch)`."""
    inner = trainer.scalar_trainer if isinstance(trainer, RewardTrainer) else trainer
    gradients, total, done = inner.optimizer.gradients, num_micro_batches(batch, trainer.config.epochs), 0

    def count() -> None:
        nonlocal done
        done += 1
        show(min(done, total), total)

    gradients.on_micro_batch = count
    try:
        yield
    finally:
        gradients.on_micro_batch = None


def most_tokens(requests: Sequence[GenerationRequest]) -> int:
    """As many as the answers to `requests` may have."""
    return sum(request.num_siblings * request.sampling.max_new_tokens for request in requests)
