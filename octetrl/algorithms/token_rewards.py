"""What advantages are made of where a sample's one number is not enough: every trained token of the whole batch.

Most objectives give a sample's advantage to each of its tokens, and `Algorithm.shape` is None. KL in the reward, GAE
and a normalisation over the batch need more: log-probs or values of all tokens, before the first update. The trainer
gathers them once, in the order of the micro-batches, and gives each micro-batch its part of what `shape` returns.

N trained tokens of the batch, B samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Made by the trainer, float32 where not said otherwise, without gradient. A sample's tokens stand together."""

    outcome_N: Tensor  # the sample's advantage (or reward, as `Algorithm.advantages` made it), on each of its tokens
    sequence_N: Tensor  # int64, 0 to num_sequences - 1 over the batch, ascending
    num_sequences: int
    is_last_N: Tensor  # bool: the sample's last trained token
    kl_N: Tensor | None = None  # log p - log reference (k1; ratios.py makes the others of it); None: no reference
    values_N: Tensor | None = None  # the critic's; None: no critic
    group_N: Tensor | None = None  # int64: which group of siblings; None: samples have none
    kl_scale: float = 1.0  # of the KL coefficient, where it adapts
