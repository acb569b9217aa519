"""RLOO (arXiv 2402.14740): each answer against the mean of its siblings, itself left out.

    A_i = r_i - mean of r_j over the siblings j != i   =   G / (G - 1) * (r_i - mean r)

A baseline that does not hold the answer's own reward leaves the policy gradient unbiased, and nothing is divided by a
deviation. As published the answer is one action, its log-prob the sum over tokens: `token_weighting: constant`, where
`constant_length` only scales the loss. The gain is GRPO's: on-policy its clip never acts and it is REINFORCE, as
published. Equal to GRPO with `normalize_advantages: false` times G / (G - 1).

    S    = exp(sum over the answer's tokens of (log p - log base))           `rloo_ratio: sequence`, as TRL has it
    gain = min(S * A, clip(S, 1 - clip_low, 1 + clip_high) * A)              once an answer: 1 / tokens on each of them

The two have the same gradient on-policy. Off it S leaves the clip's range sooner the longer the answer.

N trained tokens, B samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.algorithms.grpo import clip_gain, clipped_gain
from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.ratios import token_ratio
from octetrl.algorithms.sequences import sequence_sum
from octetrl.algorithms.spread import differences_from_mean
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import RlooConfig


def rloo_loss(inputs: LossInputs, config: RlooConfig) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    return policy_loss(inputs, config, answer_gain if config.rloo_ratio == "sequence" else clipped_gain)


def answer_gain(inputs: LossInputs, base_logprobs_N: Tensor, config: RlooConfig) -> Gain:
    """The gain of an answer, in equal parts on its tokens; the advantage is the same on all of them."""
    log_B = sequence_sum(inputs.logprobs_N - base_logprobs_N, inputs.sequence_N, inputs.num_sequences)
    ratio_N = token_ratio(log_B, log_B.new_zeros(()))[inputs.sequence_N]
    gain = clip_gain(ratio_N, inputs.advantages_N, config)
    tokens_N = torch.bincount(inputs.sequence_N, minlength=inputs.num_sequences)[inputs.sequence_N]
    return Gain(gain.gain_N / tokens_N, gain.clipped_N)


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Of one group. Equal rewards (spread.py) give zeros, exactly; so does a group of one."""
    siblings = len(rewards) - 1
    advantages = [difference * len(rewards) / max(siblings, 1) for difference in differences_from_mean(rewards)]
    assert all(map(math.isfinite, advantages)), f"rewards of up to {max(map(abs, rewards)):g} are too large to compare"
    return advantages
