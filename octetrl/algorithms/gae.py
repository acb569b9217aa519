"""Generalised advantage estimation (arXiv 1506.02438) over packed sequences.

    delta_t = r_t + discount * V_{t+1} - V_t            after a sequence's last token V is 0, or `after_N` if given
    A_t     = delta_t + discount * gae_lambda * A_{t+1}
    return  = A_t + V_t                                 the target of the value head

Use it with a value head (PPO). Usual values for language models are discount 1 and lambda 0.95. With lambda 1 the
advantage is (sum of later rewards) - V_t, unbiased for any V. With lambda 0 it is delta_t, which has the least
variance. With V = 0, discount 1 and lambda 1 every token has the outcome as its advantage, as in REINFORCE.

The recurrence is a discounted sum to go (`sequences.py`) in float64. Packing changes no bit.

N trained tokens; those of a sequence are contiguous and in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.sequences import sum_to_go


@torch.no_grad()
def gae_advantages(
    rewards_N: Tensor,
    values_N: Tensor,
    is_last_N: Tensor,
    discount: float = 1.0,
    gae_lambda: float = 0.95,
    after_N: Tensor | None = None,
) -> Tensor:
    """Advantages, float32 [N].

    `rewards_N`, `values_N`: float32 [N]. `is_last_N`: bool [N], true at the last trained token of each sequence.
    `after_N`: float32 [N], there the value of what follows, where an answer was cut off. None: an answer is an episode.
    """
    next_values_N = torch.where(is_last_N, 0.0 if after_N is None else after_N.double(), values_N.double().roll(-1))
    deltas_N = rewards_N.double() + discount * next_values_N - values_N.double()
    return sum_to_go(deltas_N, is_last_N, discount * gae_lambda).float()
