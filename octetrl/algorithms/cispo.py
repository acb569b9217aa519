"""CISPO (MiniMax-M1, arXiv 2506.13585): clip the weight, keep the token's gradient.

    gain = stop(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log p

PPO's clip takes the gradient away from tokens whose ratio left the window: often rare ones that turn an argument
("wait", "however"). Here they keep a bounded one. Defaults: no lower bound (clip_low 1), at most 5 times (clip_high 4,
as in ScaleRL, arXiv 2510.13786; the paper gives none), `token_weighting: token`. On-policy it has GRPO's gradient.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.ratios import token_ratio
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.objective_settings import ClipSettings


def cispo_loss(inputs: LossInputs, config: ClipSettings) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    return policy_loss(inputs, config, cispo_gain)


def cispo_gain(inputs: LossInputs, base_logprobs_N: Tensor, config: ClipSettings) -> Gain:
    """`clipped_N` counts bounded weights; no gradient is taken away."""
    ratio_N = token_ratio(inputs.logprobs_N.detach(), base_logprobs_N)
    weight_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return Gain(weight_N * inputs.advantages_N * inputs.logprobs_N, (weight_N != ratio_N).float())
