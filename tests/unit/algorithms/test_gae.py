"""GAE over packed sequences against the recurrence token by token in float64, its special cases, and the packing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.gae import gae_advantages
from octetrl.algorithms.sequences import last_of_each

LENGTHS = [7, 1, 12, 3, 2, 33]


def sequences(lengths: list[int]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def by_recurrence(
    rewards: list[float], values: list[float], lengths: list[int], discount: float, gae_lambda: float
) -> Tensor:
    """The paper's eq. 16 as a loop from each sequence's end."""
    advantages: list[float] = []
    start = 0
    for length in lengths:
        following, next_value, row = 0.0, 0.0, []
        for t in reversed(range(start, start + length)):
            delta = rewards[t] + discount * next_value - values[t]
            following = delta + discount * gae_lambda * following
            next_value = values[t]
            row.append(following)
        advantages += reversed(row)
        start += length
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_it_is_the_recurrence(discount: float, gae_lambda: float) -> None:
    rewards_N, values_N = torch.randn(2, sum(LENGTHS))
    is_last_N = last_of_each(sequences(LENGTHS))
    advantages_N = gae_advantages(rewards_N, values_N, is_last_N, discount, gae_lambda)
    expected_N = by_recurrence(rewards_N.tolist(), values_N.tolist(), LENGTHS, discount, gae_lambda)
    assert advantages_N.dtype == torch.float32
    torch.testing.assert_close(advantages_N, expected_N.float(), rtol=1e-6, atol=1e-6)


def test_without_values_every_token_has_the_outcome() -> None:
    sequence_N = sequences(LENGTHS)
    outcomes_B = torch.randn(len(LENGTHS))
    is_last_N = last_of_each(sequence_N)
    rewards_N = torch.where(is_last_N, outcomes_B[sequence_N], 0.0)
    zeros_N = torch.zeros(len(sequence_N))
    assert torch.equal(gae_advantages(rewards_N, zeros_N, is_last_N, 1.0, 1.0), outcomes_B[sequence_N])


def test_with_lambda_one_the_return_is_the_sum_of_later_rewards_whatever_the_values() -> None:
    rewards_N, values_N = torch.randn(2, sum(LENGTHS))
    is_last_N = last_of_each(sequences(LENGTHS))
    returns_N = gae_advantages(rewards_N, values_N, is_last_N, 1.0, 1.0) + values_N
    later = [part.flip(0).cumsum(0).flip(0) for part in rewards_N.double().split(LENGTHS)]
    torch.testing.assert_close(returns_N, torch.cat(later).float(), rtol=1e-5, atol=1e-5)


def test_packing_changes_no_bit() -> None:
    rewards_N, values_N = torch.randn(2, sum(LENGTHS))
    packed_N = gae_advantages(rewards_N, values_N, last_of_each(sequences(LENGTHS)), 0.99, 0.9)
    alone = []
    for rewards, values in zip(rewards_N.split(LENGTHS), values_N.split(LENGTHS), strict=True):
        is_last = last_of_each(torch.zeros(len(rewards), dtype=torch.int64))
        alone.append(gae_advantages(rewards, values, is_last, 0.99, 0.9))
    assert torch.equal(packed_N, torch.cat(alone))


def test_no_tokens_are_no_advantages() -> None:
    empty = torch.zeros(0)
    assert gae_advantages(empty, empty, last_of_each(torch.zeros(0, dtype=torch.int64))).shape == (0,)


def test_the_last_of_each_sequence() -> None:
    assert last_of_each(torch.tensor([0, 0, 1, 2, 2])).tolist() == [False, True, True, False, True]
