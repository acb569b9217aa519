"""SAPO (arXiv 2511.20347): a smooth gate instead of the clip.

    gain = (4 / tau) * sigmoid(tau * (ratio - 1)) * A        tau = sapo_tau_positive where A > 0, else sapo_tau_negative

Its gradient is that of ratio * A times 4 s (1 - s), where s is the sigmoid. The factor is 1 on-policy and falls
smoothly on both sides, so the gradient of a token fades with its distance and no token is cut off at an edge. Defaults
are 1.0 and 1.05, as published: tokens with negative advantages fade sooner, which is more stable. `token_weighting:
sequence`. On-policy its gradient is GRPO's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.ratios import token_ratio
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import SapoConfig


def sapo_loss(inputs: LossInputs, config: SapoConfig) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    return policy_loss(inputs, config, sapo_gain)


def sapo_gain(inputs: LossInputs, base_logprobs_N: Tensor, config: SapoConfig) -> Gain:
    """The gain of each token. `clipped_N` is the share of the gradient that the gate removes, from 0 to 1."""
    advantages_N = inputs.advantages_N
    tau_N = torch.where(advantages_N > 0, config.sapo_tau_positive, config.sapo_tau_negative).to(advantages_N.dtype)
    gate_N = (tau_N * (token_ratio(inputs.logprobs_N, base_logprobs_N) - 1.0)).sigmoid()
    kept_N = (4.0 * gate_N * (1.0 - gate_N)).detach()
    return Gain(4.0 / tau_N * gate_N * advantages_N, 1.0 - kept_N)
