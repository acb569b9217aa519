"""Describes an optimizer step that was refused because a number is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from octetrl.trainer.metric_means import MetricMeans
from octetrl.trainer.train_call import OptimizerStep

if TYPE_CHECKING:
    from octetrl.trainer.trainer import Trainer


def describe_failed_step(trainer: Trainer, step: OptimizerStep, metrics: Mapping[str, float]) -> str:
    """Run the micro-batches of a failed step again, one by one, and name the first bad one and the bad tensor.

    `metrics`: `loss` and `grad_norm` of the failed step. All workers must call it; they get the same text.
    """
    (poisoned,) = trainer.peers.sum(trainer.poisoned.reshape(1), "non-finite numbers").tolist()
    summary = f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
    summary += f", tokens with non-finite activations: {int(poisoned)}"
    found = trainer.peers.agree(_first_bad_micro_batch(trainer, step), "non-finite numbers")
    if found is None:
        count = step.num_micro_batches
        return f"{summary}: finite in each of {count} micro-batches, not in their sum; nothing was updated"
    return f"{summary}: {found}; nothing was updated, the weights are those of version {trainer.policy_version}"


def _first_bad_micro_batch(trainer: Trainer, step: OptimizerStep) -> str | None:
    for index, prepared in enumerate(step.micro_batches):
        number: list[str | None] = []
        with trainer.optimizer.gradients.inspect() as bad:
            loss = float(trainer.backward(step, prepared, MetricMeans(), None, number).loss)
        of_gradients = f", first non-finite gradient '{bad[0]}' ({len(bad)} in all)" if bad else None
        of_gradients = trainer.peers.agree_in_group(of_gradients, "non-finite numbers")
        if of_gradients or number[0] or not math.isfinite(loss):
            where = f", {number[0]}" if number[0] else ""
            where += of_gradients or ""
            share = trainer.peers.worker
            at = f" of worker {share.rank}" if share.count > 1 else ""
            longest = prepared.micro_batch.max_seqlen
            return (
                f"micro-batch {index + 1} of {len(step.micro_batches)}{at} (longest sequence {longest} tokens) has loss"
                f" {loss}{where}"
            )
    return None
