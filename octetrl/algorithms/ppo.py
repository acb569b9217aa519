"""PPO with a critic (arXiv 1707.06347; on language models as in InstructGPT, arXiv 2203.02155).

    r_t  = reward at a sequence's last token, 0 before it  -  kl_coefficient * (log p_t - log reference_t)
    A, R = GAE(r, V)                                       algorithms/gae.py; R for the critic, algorithms/value_loss.py
    A    = (A - mean A) / std A  over all tokens of the batch       `normalize_advantages`
    loss = -w * min(ratio * A, clip(ratio) * A)                     GRPO's, less its KL, which is in the reward here

Use it where single tokens deserve credit that a sibling's reward can't tell, or where there are no siblings: a group of
one will do. It costs a second model with its optimizer. With a critic that says 0, discount 1, lambda 1 and no KL every
token has its sample's reward as advantage; normalised, that is REINFORCE with a batch baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octetrl.algorithms.gae import gae_advantages
from octetrl.algorithms.grpo import grpo_loss
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.schema import AlgorithmConfig


def rewards_as_they_are(rewards: Sequence[float]) -> list[float]:
    """In the place of advantages: what a sample earned, for `shape` to put on its last token."""
    return list(rewards)


def ppo_advantages(rewards: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """float32 [N]. Equal advantages are zeros when normalised."""
    advantages_N = _gae(rewards, config, config.gae_lambda)
    return whitened(advantages_N) if config.normalize_advantages else advantages_N


def ppo_returns(rewards: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """What the critic is fitted to, float32 [N]."""
    assert rewards.values_N is not None, "PPO needs a critic's values"
    gae_lambda = config.gae_lambda if config.return_lambda is None else config.return_lambda
    return _gae(rewards, config, gae_lambda) + rewards.values_N


def ppo_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """Per-token loss [N] and its metrics."""
    loss = grpo_loss(replace(inputs, reference_logprobs_N=None), config)
    if inputs.reference_logprobs_N is None:
        return loss
    kl_N = (inputs.logprobs_N - inputs.reference_logprobs_N).detach()
    return TokenLoss(loss.loss_N, {**loss.metrics, "kl": kl_N})


def whitened(values_N: Tensor) -> Tensor:
    """Mean 0 and deviation 1 over the batch; zeros where all are equal."""
    values = values_N.double()
    deviation = values.std() if values.numel() > 1 else values.new_zeros(())
    centred_N = values - values.mean()
    return torch.where(deviation > 0, centred_N / deviation, 0.0).float()


def _gae(rewards: TokenRewards, config: AlgorithmConfig, gae_lambda: float) -> Tensor:
    assert rewards.values_N is not None, "PPO needs a critic's values"
    earned_N = torch.where(rewards.is_last_N, rewards.outcome_N, 0.0)
    if rewards.kl_N is not None:
        earned_N = earned_N - config.kl_coefficient * rewards.kl_N
    return gae_advantages(earned_N, rewards.values_N, rewards.is_last_N, config.discount, gae_lambda)
