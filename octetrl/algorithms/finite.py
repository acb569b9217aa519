"""Numbers that are not finite are found before anything is learnt from them, and named.

A loss can be finite all the same: a clip, a mask or a bounded ratio may swallow an infinite log-prob. So what goes into
a loss is counted, on the device, in the sums that the trainer reads anyway; the name is looked for when the count is
not 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.records import MicroBatch

_NAMES = {
    "logprobs_N": "log-prob",
    "generator_logprobs_N": "engine's log-prob",
    "proximal_logprobs_N": "log-prob before the first update",
    "reference_logprobs_N": "reference's log-prob",
    "advantages_N": "advantage",
}


def count_non_finite(inputs: LossInputs, loss: TokenLoss) -> Tensor:
    """How many numbers of all tokens are not finite; a float32 scalar."""
    counts = [(~values_N.detach().isfinite()).sum() for _, values_N in _watched(inputs, loss)]
    return torch.stack(counts).sum().float()


def first_non_finite(inputs: LossInputs, loss: TokenLoss, micro_batch: MicroBatch) -> str | None:
    """Which number of which sample and position, in words; None: all are finite."""
    for name, values_N in _watched(inputs, loss):
        values_N = values_N.detach()
        bad = (~values_N.isfinite()).nonzero()
        if len(bad):
            token = int(bad[0])
            sample, position = int(micro_batch.sample_N[token]), int(micro_batch.target_positions_N[token])
            return f"the {name} of sample {sample} of the batch at position {position} is {float(values_N[token])}"
    return None


def _watched(inputs: LossInputs, loss: TokenLoss) -> Iterator[tuple[str, Tensor]]:
    """In the order in which one makes the next not finite."""
    for field, name in _NAMES.items():
        values_N = getattr(inputs, field)
        if values_N is not None:
            yield name, values_N
    yield "loss (ratio or weight)", loss.loss_N
