"""REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole batch, not over a group.

    reinforce_pp            A_t = r - kl_coefficient * sum over s >= t of KL_s      k1 in the reward; no siblings needed
    reinforce_pp_baseline   A_t = r - mean r of the group                           k2 in the loss
    both                    A_t = (A_t - mean A) / std A      over all tokens of the batch

The standard deviation of a group is a noisy estimate from few answers. Dividing by it amplifies groups that are nearly
all right or nearly all wrong. The batch's deviation is stable. `reinforce_pp` also works with one answer per prompt.
Loss and clips are GRPO's. With one group, answers of one length and no KL both equal GRPO, except that n in the
deviation's n - 1 counts tokens, not answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.algorithms.kl_reward import compare_less_kl, less_kl
from octetrl.algorithms.spread import differences_from_mean, tensor_differs
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.objective_settings import KlSettings


def plain_rewards(rewards: Sequence[float]) -> list[float]:
    """The rewards as they are: the only baseline is the batch's."""
    return list(rewards)


def batch_normalized(rewards: TokenRewards, config: KlSettings) -> Tensor:
    """Advantages of all tokens of the batch, float32 [N]."""
    if config.kl_in == "reward_before_baseline":
        return whitened(compare_less_kl(rewards, config, differences_from_mean))
    return whitened(less_kl(rewards, config) if config.kl_in == "reward" else rewards.outcome_N)


def whitened(values_N: Tensor) -> Tensor:
    """Values shifted and scaled to mean 0 and standard deviation 1 (divided by n - 1).

    Exact zeros if all values are equal up to rounding (spread.py).
    """
    if not tensor_differs(values_N):
        return torch.zeros_like(values_N)
    values = values_N.double()
    return ((values - values.mean()) / values.std()).to(values_N.dtype)
