"""KL to the reference as part of the reward, not of the loss (InstructGPT, arXiv 2203.02155).

    A_t = A - kl_coefficient * sum over s >= t of KL_s          the sample's advantage minus the KL from t on

The KL of a token is charged to it and to all tokens before it in its answer. Log-probs are those before the first
update. The result is the policy gradient of E[reward - kl_coefficient * KL(policy || reference)] over whole answers; a
KL term in the loss sees only each token's own KL. k1 is the unbiased estimator here, because nothing is differentiated.
The KL is not part of the group's normalisation.

    A_i = rule(r - kl_coefficient * sum over the answer of KL)_i       `kl_in: reward_before_baseline`

This is what RLOO in TRL does, and verl with use_kl_in_reward: they subtract the KL of a whole answer from its reward
and then compare siblings. All tokens of an answer get the same advantage, which depends on its KL relative to its
siblings'. Only differences between siblings matter. The rollout therefore passes r minus its group's mean, which
float32 represents more accurately than r.

N trained tokens of the batch, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octetrl.algorithms.ratios import kl_of_ratio
from octetrl.algorithms.sequences import sequence_sum, sum_to_go
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.objective_settings import KlSettings


def less_kl(rewards: TokenRewards, config: KlSettings) -> Tensor:
    """The outcome minus the KL of this and all later tokens of the sample, float32 [N]."""
    if rewards.kl_N is None:
        return rewards.outcome_N
    kl_N = kl_of_ratio(rewards.kl_N, config.kl_estimator)
    return rewards.outcome_N - config.kl_coefficient * rewards.kl_scale * sum_to_go(kl_N, rewards.is_last_N)


def compare_less_kl(
    rewards: TokenRewards, config: KlSettings, rule: Callable[[Sequence[float]], Sequence[float]]
) -> Tensor:
    """Advantages by `rule` of each group's rewards minus the KL of the answers, float32 [N].

    `rewards.outcome_N` may differ from the rewards by a constant per group.
    """
    assert rewards.kl_N is not None and rewards.group_N is not None, "KL before the baseline needs KL and groups"
    kl_N = kl_of_ratio(rewards.kl_N, config.kl_estimator).double()
    kl_B = sequence_sum(kl_N, rewards.sequence_N, rewards.num_sequences)
    net_B = rewards.outcome_N[rewards.is_last_N].double() - config.kl_coefficient * rewards.kl_scale * kl_B
    net, groups = net_B.tolist(), rewards.group_N[rewards.is_last_N].tolist()
    members: dict[int, list[int]] = {}
    for sample, group in enumerate(groups):
        members.setdefault(group, []).append(sample)
    advantages = [0.0] * len(net)
    for siblings in members.values():
        for sample, advantage in zip(siblings, rule([net[sample] for sample in siblings]), strict=True):
            advantages[sample] = advantage
    return torch.tensor(advantages, dtype=torch.float32, device=kl_B.device)[rewards.sequence_N]
