"""What is needed to show progress: the micro-batches of a `train` call that are done, and how far a rollout is.

A micro-batch counts when its backward has been launched. On a GPU the device is then at most a few kernels behind. A
critic's micro-batches are not counted: they follow those of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octetrl.records import GenerationProgress, GenerationRequest, OnProgress, PackedBatch
from octetrl.telemetry.console import Console
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.trainer import Trainer


def num_micro_batches(batch: PackedBatch, epochs: int) -> int:
    """The micro-batches of a `train` call, over all its passes."""
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


@contextmanager
def rollout_shown(console: Console, most: int | None = None) -> Iterator[OnProgress]:
    """The console's phase of a rollout; its callback shows how far the rollout is. most: tokens, None: not known."""
    with console.phase("rollout") as show:

        def on_progress(progress: GenerationProgress) -> None:
            show(progress.done, progress.total, progress.generated_tokens, most)

        yield on_progress


def most_tokens(requests: Sequence[GenerationRequest]) -> int:
    """As many as the answers to `requests` may have."""
    return sum(request.num_siblings * request.sampling.max_new_tokens for request in requests)
