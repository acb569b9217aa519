"""Input and output of an algorithm's loss. Both are per token: the trainer has the only division.

N trained tokens of one micro-batch, B samples, K tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Made by the trainer, one a micro-batch. Everything is float32 and only the policy's own log-probs and entropy
    carry a gradient."""

    logprobs_N: Tensor
    entropy_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor  # int64, ascending: which sample of the micro-batch; whole samples share a micro-batch
    num_sequences: int  # B
    generator_logprobs_N: Tensor | None = None  # the engine's, when it drew the tokens; None for SFT
    proximal_logprobs_N: Tensor | None = None  # the trainer's before the first of several updates; None: one update
    reference_logprobs_N: Tensor | None = None  # None: no KL term
    teacher_top_logprobs_NK: Tensor | None = None  # of the teacher's K likeliest tokens; None: no KL to a teacher
    top_logprobs_NK: Tensor | None = None  # the policy's of these tokens, with gradient
    chosen_N: Tensor | None = None  # bool: of the better sample of its pair; None where samples are not pairs
    mean_weight: Tensor | None = None  # of the correction over the optimizer step; None: not asked for
    kept_share: Tensor | None = None  # of the optimizer step's token weights, that no mask leaves out; None: all count
    kl_scale: float = 1.0  # of the KL coefficient, where it adapts
    on_policy: bool = False  # drawn with the very weights that `logprobs_N` come from, and this is the only update


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`loss_N` is summed with the token weights and divided once, by the trainer. A metric is the plain mean over its
    own items, tokens or pairs: token weights do not enter it."""

    loss_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # name -> one value an item, detached
