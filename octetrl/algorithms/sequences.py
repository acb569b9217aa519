"""Sums over the tokens of each sample, for samples end to end. `sequence_N` is the sample of each token.

Each is one segmented reduction, so the order of a sum does not depend on what else shares the micro-batch.

N tokens, B samples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Sums, [B], differentiable. `sequence_N`: int64 [N], ascending. A sample without tokens has 0."""
    counts_B = torch.bincount(sequence_N, minlength=num_sequences)
    sums_B: Tensor = torch.segment_reduce(values_N.contiguous(), "sum", lengths=counts_B, initial=0)
    return sums_B


def sequence_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Means, [B], differentiable. A sample without tokens has 0."""
    counts_B = torch.bincount(sequence_N, minlength=num_sequences).clamp(min=1)
    return sequence_sum(values_N, sequence_N, num_sequences) / counts_B


def last_of_each(sequence_N: Tensor) -> Tensor:
    """bool [N]: true at the last token of each sample."""
    is_last_N = torch.ones_like(sequence_N, dtype=torch.bool)
    is_last_N[:-1] = sequence_N[1:] != sequence_N[:-1]
    return is_last_N


def sum_to_go(values_N: Tensor, is_last_N: Tensor, discount: float = 1.0) -> Tensor:
    """The discounted sum of a token's value and of those after it in its sample: [N], without gradient.

    Sums are in float64. After k passes each token has the sum of 2^k tokens of its sample, so N tokens take log2 N
    passes. The order of a sum depends only on the distance to the sample's end. A value that is not finite affects only
    its own sample.
    """
    sums_N, carry_N = values_N.double(), discount * (~is_last_N).double()
    shift = 1
    while shift < sums_N.numel():
        reached_N = torch.where(carry_N[:-shift] == 0, 0.0, carry_N[:-shift] * sums_N[shift:])  # 0 * inf is NaN
        sums_N = torch.cat([sums_N[:-shift] + reached_N, sums_N[-shift:]])
        carry_N = torch.cat([carry_N[:-shift] * carry_N[shift:], carry_N[-shift:]])
        shift *= 2
    return sums_N.to(values_N.dtype)
