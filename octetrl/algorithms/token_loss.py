"""Input and output of an algorithm's loss. Both are per token: only the trainer divides.

N trained tokens of one micro-batch, B samples, K tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of the loss of one micro-batch, created by the trainer.

    Tensors are float32 unless stated otherwise. Only the policy's log-probs and entropy carry a gradient.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor  # int64, ascending: which sample of the micro-batch; whole samples share a micro-batch
    num_sequences: int  # B
    generator_logprobs_N: Tensor | None = None  # the engine's, when it sampled the tokens; None for SFT
    proximal_logprobs_N: Tensor | None = None  # the trainer's before the first of several updates; None: one update
    reference_logprobs_N: Tensor | None = None  # None: no KL term
    teacher_top_logprobs_NK1: Tensor | None = None  # of the teacher's K likeliest tokens and all others; None: no KL
    top_logprobs_NK1: Tensor | None = None  # the policy's of these tokens and of all others, with gradient
    chosen_N: Tensor | None = None  # bool: of the better sample of its pair; None where samples are not pairs
    mean_weight: Tensor | None = None  # of the correction over the optimizer step; None: not asked for
    kept_share: Tensor | None = None  # share of the step's token weights that no mask leaves out; None: all count
    kl_scale: float = 1.0  # factor of the KL coefficient (kl_control.py)
    on_policy: bool = False  # sampled with the weights of `logprobs_N`, and this is the only update


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The result of a loss.

    The trainer sums `loss_N` with the token weights and divides once. A metric is the unweighted mean over its own
    items, which are tokens or pairs.
    """

    loss_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # name -> one value per item, detached
