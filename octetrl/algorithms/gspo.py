"""GSPO (arXiv 2507.18071): one ratio per answer, because the reward is per answer.

    s    = exp(mean over the answer's tokens of (log p - log base))          its geometric mean
    gain = min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)              for each of its tokens

    gspo_token:  s_t = stop(s) * p_t / stop(p_t)      the value of s; each token has its own gradient and advantage

A whole answer is clipped or not. The clips are therefore narrow: 3e-4 and 4e-4 as published, with `token_weighting:
sequence`. The importance correction is per answer too, `corrections: [sequence_tis]`. Use it for long answers and for
mixtures of experts, where ratios of single tokens are mostly noise. On answers of one token it is GRPO. If all tokens
of an answer have one advantage, `gspo_token` has the value and gradient of GSPO.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.algorithms.grpo import clip_gain
from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.ratios import token_ratio
from octetrl.algorithms.sequences import sequence_mean
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.objective_settings import ClipSettings


def gspo_loss(inputs: LossInputs, config: ClipSettings) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    return policy_loss(inputs, config, gspo_gain)


def gspo_token_loss(inputs: LossInputs, config: ClipSettings) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    return policy_loss(inputs, config, gspo_token_gain)


def gspo_gain(inputs: LossInputs, base_logprobs_N: Tensor, config: ClipSettings) -> Gain:
    """One ratio per answer, with the gradient through all its tokens."""
    return clip_gain(_sequence_ratio(inputs.logprobs_N, base_logprobs_N, inputs), inputs.advantages_N, config)


def gspo_token_gain(inputs: LossInputs, base_logprobs_N: Tensor, config: ClipSettings) -> Gain:
    """The value of the answer's ratio, with each token's own gradient."""
    logprobs_N = inputs.logprobs_N
    ratio_N = _sequence_ratio(logprobs_N.detach(), base_logprobs_N, inputs) * token_ratio(
        logprobs_N, logprobs_N.detach()
    )
    return clip_gain(ratio_N, inputs.advantages_N, config)


def _sequence_ratio(logprobs_N: Tensor, base_logprobs_N: Tensor, inputs: LossInputs) -> Tensor:
    means_B = sequence_mean(logprobs_N - base_logprobs_N, inputs.sequence_N, inputs.num_sequences)
    return token_ratio(means_B, means_B.new_zeros(()))[inputs.sequence_N]
