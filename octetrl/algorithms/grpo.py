"""GRPO (DeepSeekMath, arXiv 2402.03300), with DAPO's asymmetric clip (arXiv 2503.14476).

    gain = min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)          A: group-relative (advantages.py)

It is the default choice: no critic and few parameters. Published settings: clips of 0.2, `token_weighting: sequence`,
k3 in the loss. Defaults here: `token_weighting: token`, no KL. Dr.GRPO (arXiv 2503.20783) is `normalize_advantages:
false` with `token_weighting: constant`. On-policy the ratio is exactly 1 and the gradient is A * grad log p: REINFORCE
with the group's mean as baseline.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.ratios import token_ratio
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.objective_settings import ClipSettings


def grpo_loss(inputs: LossInputs, config: ClipSettings) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    return policy_loss(inputs, config, clipped_gain)


def clipped_gain(inputs: LossInputs, base_logprobs_N: Tensor, config: ClipSettings) -> Gain:
    """The smaller of the plain and the clipped gain, token by token, as in PPO."""
    return clip_gain(token_ratio(inputs.logprobs_N, base_logprobs_N), inputs.advantages_N, config)


def clip_gain(ratio_N: Tensor, advantages_N: Tensor, config: ClipSettings) -> Gain:
    """The same from given ratios, float32 [N]."""
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    plain_N, clipped_N = ratio_N * advantages_N, clipped_N * advantages_N
    return Gain(plain_N.minimum(clipped_N), (clipped_N < plain_N).float())
