"""Dual-clip PPO (arXiv 1912.09729): a lower bound for the gain of a token with a negative advantage.

    gain = max(min(ratio * A, clip(ratio) * A), dual_clip * A)     where A < 0;  GRPO's elsewhere

In GRPO, ratio * A has no lower bound if A < 0 and the ratio is large. One stale token that the policy now prefers can
then dominate the step. Use dual-clip with stale samples or many updates per batch. The default is 3, as published. If
no ratio reaches `dual_clip`, as in every on-policy step, it equals GRPO.
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
