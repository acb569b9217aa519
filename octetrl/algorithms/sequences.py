"""Sums over the tokens of each sample, where samples stand end to end and `sequence_N` says which is whose.

Each is one segmented reduction, so the order of a sum does not depend on what else shares the micro-batch.

N tokens, B samples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[B], differentiable. `sequence_N` ascends; a sample without tokens has 0."""
    counts_B = torch.bincount(sequence_N, minlength=num_sequences)
    sums_B: Tensor = torch.segment_reduce(values_N.contiguous(), "sum", lengths=counts_B, initial=0)
    return sums_B


def sequence_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """[B], differentiable; a sample without tokens has 0."""
    counts_B = torch.bincount(sequence_N, minlength=num_sequences).clamp(min=1)
    return sequence_sum(values_N, sequence_N, num_sequences) / counts_B


def sum_to_go(values_N: Tensor, is_last_N: Tensor, discount: float = 1.0) -> Tensor:
    """Of each token and those after it in its sample, each `discount` times what the one before it counts: [N], without
    gradient, summed in float64.

    By doubling: after k passes a token has summed 2^k of its sample, so N tokens take log2 N passes. The order of a sum
    follows from the distance to the sample's end alone, and a value that is not finite stays within its sample.
    """
    sums_N, carry_N = values_N.double(), discount * (~is_last_N).double()
    shift = 1
    while shift < sums_N.numel():
        reached_N = torch.where(carry_N[:-shift] == 0, 0.0, carry_N[:-shift] * sums_N[shift:])  # 0 * inf is NaN
        sums_N = torch.cat([sums_N[:-shift] + reached_N, sums_N[-shift:]])
        carry_N = torch.cat([carry_N[:-shift] * carry_N[shift:], carry_N[-shift:]])
        shift *= 2
    return sums_N.to(values_N.dtype)
