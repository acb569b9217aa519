"""Dual-clip PPO (arXiv 1912.09729): a floor under what a bad token can cost.

    gain = max(min(ratio * A, clip(ratio) * A), dual_clip * A)     where A < 0;  GRPO's elsewhere

GRPO's minimum leaves ratio * A unbounded below when A < 0 and the ratio is large, so one stale token the policy has
come to like can rule the step. Use it with stale samples or many updates a batch. Default 3, as published. Equal to
GRPO where no ratio reaches `dual_clip`, so in any on-policy step.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.algorithms.grpo import clipped_gain
from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import DualClipConfig


def dual_clip_loss(inputs: LossInputs, config: DualClipConfig) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    return policy_loss(inputs, config, dual_clip_gain)


def dual_clip_gain(inputs: LossInputs, base_logprobs_N: Tensor, config: DualClipConfig) -> Gain:
    """GRPO's gain with a floor for negative advantages."""
    gain_N, clipped_N = clipped_gain(inputs, base_logprobs_N, config)
    floor_N = (config.dual_clip * inputs.advantages_N).where(inputs.advantages_N < 0, -float("inf"))
    below_N = gain_N < floor_N
    return Gain(gain_N.maximum(floor_N), clipped_N.maximum(below_N.float()))
