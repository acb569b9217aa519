"""RLOO (arXiv 2402.14740): the reward of each answer minus the mean reward of its siblings, without its own.

    A_i = r_i - mean of r_j over the siblings j != i   =   G / (G - 1) * (r_i - mean r)

The baseline does not contain the answer's own reward, so the policy gradient is unbiased. There is no division by a
standard deviation. In the paper an answer is one action whose log-prob is the sum over its tokens: `token_weighting:
constant`, where `constant_length` only scales the loss. The gain is GRPO's. On-policy its clip never acts, and it is
REINFORCE, as published. It equals GRPO with `normalize_advantages: false` times G / (G - 1).

    S    = exp(sum over the answer's tokens of (log p - log base))           `rloo_ratio: sequence`, as TRL has it
    gain = min(S * A, clip(S, 1 - clip_low, 1 + clip_high) * A)              once an answer: 1 / tokens on each of them

The two have the same gradient on-policy. Off-policy, S leaves the clip's range sooner if the answer is longer.

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
    """The gain of an answer, in equal parts on its tokens. All tokens of an answer have the same advantage."""
    log_B = sequence_sum(inputs.logprobs_N - base_logprobs_N, inputs.sequence_N, inputs.num_sequences)
    ratio_N = token_ratio(log_B, log_B.new_zeros(()))[inputs.sequence_N]
    gain = clip_gain(ratio_N, inputs.advantages_N, config)
    tokens_N = torch.bincount(inputs.sequence_N, minlength=inputs.num_sequences)[inputs.sequence_N]
    return Gain(gain.gain_N / tokens_N, gain.clipped_N)


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Advantages of one group. Equal rewards (spread.py) and a group of one give exact zeros."""
    siblings = len(rewards) - 1
    advantages = [difference * len(rewards) / max(siblings, 1) for difference in differences_from_mean(rewards)]
    assert all(map(math.isfinite, advantages)), f"rewards of up to {max(map(abs, rewards)):g} are too large to compare"
    return advantages
