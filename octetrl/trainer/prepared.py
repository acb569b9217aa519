"""Micro-batches with what is computed of them once, before the first update, and the advantages made of that.

N trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.records import MicroBatch


@dataclass(slots=True)
class Prepared:
    """A micro-batch on the device, with the log-probs that stay as they are during the call."""

    micro_batch: MicroBatch
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    first_N: Tensor | None = None  # the trainer's, before any update
    values_N: Tensor | None = None  # the critic's, before any update
    returns_N: Tensor | None = None  # what the critic is fitted to


def shape_advantages(shape: Callable[[TokenRewards], Tensor], prepared: Sequence[Prepared]) -> None:
    """Replaces the advantages of these micro-batches, all of one `train` call, by what `shape` makes of them."""
    counts = [one.micro_batch.sequence_N.numel() for one in prepared]
    shaped_N = shape(token_rewards(prepared))
    assert shaped_N.shape == (sum(counts),), f"{tuple(shaped_N.shape)} advantages for {sum(counts)} tokens"
    for one, advantages_N in zip(prepared, shaped_N.float().split(counts), strict=True):
        one.micro_batch = replace(one.micro_batch, advantages_N=advantages_N)


def token_rewards(prepared: Sequence[Prepared]) -> TokenRewards:
    """All trained tokens of these micro-batches, in their order."""
    sequences, num_sequences = [], 0
    for one in prepared:
        sequences.append(one.micro_batch.sequence_N + num_sequences)
        num_sequences += num_sequences_of(one.micro_batch)
    sequence_N = torch.cat(sequences)
    is_last_N = torch.ones_like(sequence_N, dtype=torch.bool)
    is_last_N[:-1] = sequence_N[1:] != sequence_N[:-1]
    first_N = _joined([one.first_N for one in prepared])
    reference_N = _joined([one.reference_N for one in prepared])
    return TokenRewards(
        outcome_N=torch.cat([one.micro_batch.advantages_N for one in prepared]),
        sequence_N=sequence_N,
        num_sequences=num_sequences,
        is_last_N=is_last_N,
        kl_N=None if first_N is None or reference_N is None else first_N - reference_N,
        values_N=_joined([one.values_N for one in prepared]),
    )


def num_sequences_of(micro_batch: MicroBatch) -> int:
    return micro_batch.cu_seqlens_B1.numel() - 1


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    assert len(given) in (0, len(parts)), "some micro-batches were prepared and others not"
    return torch.cat(given) if given else None
