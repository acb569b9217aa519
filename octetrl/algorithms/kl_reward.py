"""KL to the reference in the reward rather than in the loss (InstructGPT, arXiv 2203.02155).

    A_t = A - kl_coefficient * sum over s >= t of KL_s          the sample's advantage, less the KL still to come

A token is charged for the KL of itself and of what it leads to, by the log-probs before the first update: the policy
gradient of E[reward - kl_coefficient * KL(policy || reference)] over whole answers, where the loss' term only sees each
token's own. k1 is the unbiased choice here, since nothing is differentiated. The KL is outside the group's
normalisation.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.algorithms.ratios import kl_of_ratio
from octetrl.algorithms.sequences import sum_to_go
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.schema import AlgorithmConfig


def less_kl(rewards: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """The outcome less the KL to come, float32 [N]."""
    if rewards.kl_N is None:
        return rewards.outcome_N
    kl_N = kl_of_ratio(rewards.kl_N, config.kl_estimator)
    return rewards.outcome_N - config.kl_coefficient * rewards.kl_scale * sum_to_go(kl_N, rewards.is_last_N)
