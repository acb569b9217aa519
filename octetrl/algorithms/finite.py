"""Find and name numbers that are not finite, before the trainer learns from them.

A loss can be finite although its inputs are not: a clip, a mask or a bounded ratio may hide an infinite log-prob.
Therefore the inputs of each loss are counted, on the device. The trainer reads the count together with loss and norm.
It searches for the name only if the count is not 0.
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
    """How many numbers of all tokens are not finite, a float32 scalar on the device."""
    counts = [(~values_N.detach().isfinite()).sum() for _, values_N in _watched(inputs, loss)]
    return torch.stack(counts).sum().float()


def first_non_finite(inputs: LossInputs, loss: TokenLoss, micro_batch: MicroBatch) -> str | None:
    """The first number that is not finite, with its sample and position, in words; None if all are finite."""
    for name, values_N in _watched(inputs, loss):
        values_N = values_N.detach()
        bad = (~values_N.isfinite()).nonzero()
        if len(bad):
            token = int(bad[0])
            sample, position = int(micro_batch.sample_N[token]), int(micro_batch.target_positions_N[token])
            return f"the {name} of sample {sample} of the batch at position {position} is {float(values_N[token])}"
    return None


def _watched(inputs: LossInputs, loss: TokenLoss) -> Iterator[tuple[str, Tensor]]:
    """Names and values, causes before their effects."""
    for field, name in _NAMES.items():
        values_N = getattr(inputs, field)
        if values_N is not None:
            yield name, values_N
    yield "loss (ratio or weight)", loss.loss_N
