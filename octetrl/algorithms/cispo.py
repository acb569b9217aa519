"""CISPO (MiniMax-M1, arXiv 2506.13585): bounds the weight of a token and keeps its gradient.

    gain = stop(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log p

PPO's clip removes the gradient of tokens whose ratio has left the window. These are often rare tokens that change the
course of an argument ("wait", "however"). With CISPO their gradient is bounded instead. Defaults: no lower bound
(clip_low 1) and a weight of at most 5 (clip_high 4, as in ScaleRL, arXiv 2510.13786; the CISPO paper gives no value),
`token_weighting: token`. On-policy its gradient is GRPO's.
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
    """The gain of each token. `clipped_N` is 1 where the weight is bounded; the gradient remains."""
    ratio_N = token_ratio(inputs.logprobs_N.detach(), base_logprobs_N)
    weight_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return Gain(weight_N * inputs.advantages_N * inputs.logprobs_N, (weight_N != ratio_N).float())
