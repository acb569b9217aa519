"""Generalised advantage estimation (arXiv 1506.02438) over packed sequences.

    delta_t = r_t + discount * V_{t+1} - V_t            V after a sequence's last token is 0: an answer is an episode
    A_t     = delta_t + discount * gae_lambda * A_{t+1}
    return  = A_t + V_t                                 what the value head is fitted to

Use it where a value head exists (PPO). Defaults as for language models: discount 1, lambda 0.95. With lambda 1 the
advantage is (sum of later rewards) - V_t, unbiased whatever V is; with lambda 0 it is delta_t, of least variance; with
V = 0, discount 1 and lambda 1 it is the outcome on every token, as REINFORCE has it.

The recurrence is a discounted sum to go (`sequences.py`), in float64: packing changes no bit.

N trained tokens; those of a sequence stand together, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.sequences import sum_to_go


@torch.no_grad()
def gae_advantages(
    rewards_N: Tensor, values_N: Tensor, is_last_N: Tensor, discount: float = 1.0, gae_lambda: float = 0.95
) -> Tensor:
    """float32 [N]. `is_last_N` is true at the last trained token of each sequence, beyond which nothing reaches."""
    next_values_N = torch.where(is_last_N, 0.0, values_N.double().roll(-1))
    deltas_N = rewards_N.double() + discount * next_values_N - values_N.double()
    return sum_to_go(deltas_N, is_last_N, discount * gae_lambda).float()


def last_of_each(sequence_N: Tensor) -> Tensor:
    """bool [N]: where a token is the last of its sequence. `sequence_N` changes from one sequence to the next."""
    if not sequence_N.numel():
        return torch.zeros_like(sequence_N, dtype=torch.bool)
    ends_N = torch.ones_like(sequence_N, dtype=torch.bool)
    ends_N[:-1] = sequence_N[1:] != sequence_N[:-1]
    return ends_N
