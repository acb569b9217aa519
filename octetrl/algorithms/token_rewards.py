"""The inputs of advantages that differ from token to token: data of every trained token of the whole batch.

Most objectives give all tokens of a sample the same advantage, and `Algorithm.shape` is None. KL in the reward, GAE and
a normalisation over the batch need log-probs or values of all tokens, before the first update. The trainer gathers them
once, in the order of the micro-batches, and gives each micro-batch its part of the result of `shape`.

N trained tokens of the batch, B samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Data of all trained tokens, created by the trainer: float32 unless stated otherwise, without gradient.

    The tokens of a sample are contiguous.
    """

    outcome_N: Tensor  # the sample's advantage by `Algorithm.advantages`, on each of its tokens
    sequence_N: Tensor  # int64, 0 to num_sequences - 1 over the batch, ascending
    num_sequences: int
    is_last_N: Tensor  # bool: the sample's last trained token
    kl_N: Tensor | None = None  # log p - log reference (k1; ratios.py computes k2 and k3 from it); None: no reference
    values_N: Tensor | None = None  # the critic's; None: no critic
    after_N: Tensor | None = None  # the critic's after a sample that was cut off, on its last token; 0 elsewhere
    group_N: Tensor | None = None  # int64: number of the group of siblings; None: no groups
    kl_scale: float = 1.0  # factor of the KL coefficient (kl_control.py)
