"""Group-relative advantages: how much better a rollout's reward is than the rewards of its siblings.

    GRPO     A_i = (r_i - mean r) / std r      DeepSeekMath, arXiv 2402.03300, eq. 3
    Dr.GRPO  A_i =  r_i - mean r               arXiv 2503.20783: the division favours groups that are nearly all
                                               right or nearly all wrong

`std` is the sample standard deviation (divided by n - 1), as in the published implementations. Rewards that differ only
by rounding (spread.py) give exact zeros. No epsilon is added to the deviation: it would turn the rounding error of a
mean into an advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from octetrl.algorithms.spread import differences_from_mean, near_one
from octetrl.records import differ

# Rewards of all groups of a step -> as many advantages; None: the rollout with this reward is not trained on.
Advantages = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float | None]]]


def group_relative_advantages(rewards: Sequence[float], normalize: bool = True) -> list[float]:
    """The advantage of each sibling of one group. `normalize`: divide by the standard deviation (GRPO)."""
    if not normalize or not differ(rewards):
        return differences_from_mean(rewards)
    scaled, _ = near_one(rewards)  # squares of tiny or huge rewards would leave the range of a float
    differences = differences_from_mean(scaled)
    deviation = math.sqrt(math.fsum(d * d for d in differences) / (len(rewards) - 1))
    return [difference / deviation for difference in differences]


def by_group(rule: Callable[[Sequence[float]], Sequence[float | None]]) -> Advantages:
    """Apply the rule of one group to every group of a step."""

    def advantages(groups: Sequence[Sequence[float]]) -> list[Sequence[float | None]]:
        return [rule(rewards) for rewards in groups]

    return advantages
