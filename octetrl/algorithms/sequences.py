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


def sum_to_go(values_N: Tensor, is_last_N: Tensor) -> Tensor:
    """Of each token and those after it in its sample, [N], without gradient; summed in float64."""
    from_here_N = values_N.double().flip(0).cumsum(0).flip(0)
    after_N = torch.cat([from_here_N[1:], from_here_N.new_zeros(1)])
    position_N = torch.arange(values_N.numel(), device=values_N.device)
    # The nearest last token at or after each token: a running minimum from the right.
    last_N = torch.where(is_last_N, position_N, values_N.numel()).flip(0).cummin(0).values.flip(0)
    return (from_here_N - after_N[last_N]).to(values_N.dtype)
