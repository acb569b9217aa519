"""The metrics of one `train` call, over all workers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from octetrl.algorithms.corrections import effective_sample_size
from octetrl.trainer.train_call import TrainCall

if TYPE_CHECKING:
    from octetrl.trainer.trainer import Trainer


def call_metrics(trainer: Trainer, call: TrainCall) -> dict[str, float]:
    """Means over the optimizer steps and over the trained tokens, and counts. All workers get the same."""
    num_updates = len(call.updates)
    metrics = {name: sum(update[name] for update in call.updates) / num_updates for name in call.updates[0]}
    metrics |= call.metrics | call.means.read(trainer.peers) | trainer.routers.metrics()
    metrics |= effective_sample_size(metrics)
    if call.lr is not None:
        metrics["time/requantize"] *= num_updates
    if trainer.optimizer.gradients.rounding is not None:
        metrics |= trainer.optimizer.gradients.rounding.take_metrics()
    metrics["lr"] = call.lr or 0.0
    metrics["train/updates"] = float(num_updates)
    own_tokens = sum(one.micro_batch.token_ids_T.numel() for one in call.micro_batches)
    counts = trainer.peers.sum(torch.tensor([int(trainer.poisoned), own_tokens]), "token counts")
    metrics["train/non_finite_tokens"], tokens = counts.tolist()
    metrics["train/tokens_per_second"] = tokens / (time.perf_counter() - call.started)
    return metrics
