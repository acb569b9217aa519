"""Supervised fine-tuning: the negative log-prob of each answer token, without ratios, advantages or corrections."""

from __future__ import annotations

from octetrl.algorithms.token_loss import LossInputs, TokenLoss


def sft_loss(inputs: LossInputs) -> TokenLoss:
    """Per-token loss [N]."""
    return TokenLoss(-inputs.logprobs_N)
