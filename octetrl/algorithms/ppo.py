"""PPO with a critic (arXiv 1707.06347; for language models as in InstructGPT, arXiv 2203.02155).

    r_t  = reward at a sequence's last token, 0 before it  -  kl_coefficient * KL_t     defaults: k1, in the reward
    A, R = GAE(r, V)                                       algorithms/gae.py; R for the critic, algorithms/value_loss.py
    A    = (A - mean A) / std A  over all tokens of the batch       `normalize_advantages`
    loss = -w * min(ratio * A, clip(ratio) * A)                     GRPO's (grpo.py)

Use it if single tokens deserve credit that a comparison of siblings cannot give, or if there are no siblings: a group
of one is enough. It costs a second model with its optimizer. With a critic that is 0 everywhere, discount 1, lambda 1
and no KL, every token has its sample's reward as advantage. Normalised, that is REINFORCE with a batch baseline.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.gae import gae_advantages
from octetrl.algorithms.ratios import kl_of_ratio
from octetrl.algorithms.reinforce_pp import whitened
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.algorithm import PpoConfig


def ppo_advantages(rewards: TokenRewards, config: PpoConfig) -> Tensor:
    """Advantages, float32 [N]. If they are normalised and all equal, they are zeros."""
    advantages_N = _gae(rewards, config, config.gae_lambda)
    return whitened(advantages_N) if config.normalize_advantages else advantages_N


def ppo_returns(rewards: TokenRewards, config: PpoConfig) -> Tensor:
    """The critic's targets, float32 [N]."""
    assert rewards.values_N is not None, "PPO needs a critic's values"
    gae_lambda = config.gae_lambda if config.return_lambda is None else config.return_lambda
    return _gae(rewards, config, gae_lambda) + rewards.values_N


def _gae(rewards: TokenRewards, config: PpoConfig, gae_lambda: float) -> Tensor:
    assert rewards.values_N is not None, "PPO needs a critic's values"
    earned_N = torch.where(rewards.is_last_N, rewards.outcome_N, 0.0)
    if rewards.kl_N is not None and config.kl_in == "reward":
        kl_N = kl_of_ratio(rewards.kl_N, config.kl_estimator)
        earned_N = earned_N - config.kl_coefficient * rewards.kl_scale * kl_N
    after_N = rewards.after_N if config.truncated == "bootstrap" else None
    return gae_advantages(earned_N, rewards.values_N, rewards.is_last_N, config.discount, gae_lambda, after_N)
