"""RLOO (arXiv 2402.14740): each answer against the mean of its siblings, itself left out.

    A_i = r_i - mean of r_j over the siblings j != i   =   G / (G - 1) * (r_i - mean r)

A baseline that does not hold the answer's own reward leaves the policy gradient unbiased, and nothing is divided by a
deviation. As published the answer is one action, its log-prob the sum over tokens: `token_weighting: constant`, where
`constant_length` only scales the loss. The gain is GRPO's: on-policy its clip never acts and it is REINFORCE, as
published. Equal to GRPO with `normalize_advantages: false` times G / (G - 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from octetrl.algorithms.spread import differences_from_mean


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Of one group. Equal rewards (spread.py) give zeros, exactly; so does a group of one."""
    siblings = len(rewards) - 1
    return [difference * len(rewards) / max(siblings, 1) for difference in differences_from_mean(rewards)]
