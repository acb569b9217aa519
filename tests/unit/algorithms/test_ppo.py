"""PPO's advantages and returns, GAE and the value loss: against float64 loops from the formulas, in special cases, and
in any packing."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.gae import gae_advantages
from octetrl.algorithms.ppo import ppo_advantages, ppo_returns
from octetrl.algorithms.sequences import last_of_each
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.algorithms.value_loss import value_loss
from octetrl.config.objective_settings import AlgorithmConfig
from tests.objectives import objective

LENGTHS = [4, 1, 9, 6, 33]
CONFIG = objective(name="ppo", kl_coefficient=0.3, gae_lambda=0.9, discount=0.98, normalize_advantages=False)


def token_rewards(*, kl: bool = True) -> TokenRewards:
    sequence_N = sequences(LENGTHS)
    outcome_N = torch.randn(len(LENGTHS))[sequence_N]
    kl_N, values_N = torch.randn(2, len(sequence_N))
    return TokenRewards(outcome_N, sequence_N, len(LENGTHS), last_of_each(sequence_N), kl_N if kl else None, values_N)


def dense(rewards: TokenRewards, config: AlgorithmConfig, gae_lambda: float) -> list[float]:
    """A_t = sum_l (discount lambda)^l delta_{t+l}, each sum written out."""
    assert rewards.values_N is not None and rewards.kl_N is not None
    found: list[float] = []
    for sequence in range(len(LENGTHS)):
        mine = rewards.sequence_N == sequence
        values = [*rewards.values_N[mine].double().tolist(), 0.0]
        earned = [-config.kl_coefficient * kl for kl in rewards.kl_N[mine].double().tolist()]
        earned[-1] += rewards.outcome_N[mine].double().tolist()[0]
        deltas = [r + config.discount * values[t + 1] - values[t] for t, r in enumerate(earned)]
        for t in range(len(deltas)):
            found.append(sum((config.discount * gae_lambda) ** (u - t) * deltas[u] for u in range(t, len(deltas))))
    return found


def test_advantages_are_those_of_the_formula() -> None:
    rewards = token_rewards()
    expected = torch.tensor(dense(rewards, CONFIG, 0.9))
    torch.testing.assert_close(ppo_advantages(rewards, CONFIG), expected, rtol=1e-5, atol=1e-5)


def test_normalised_they_have_mean_zero_and_deviation_one_over_the_batch() -> None:
    rewards = token_rewards()
    plain = dense(rewards, CONFIG, 0.9)
    mean, deviation = statistics.fmean(plain), statistics.stdev(plain)
    expected = torch.tensor([(advantage - mean) / deviation for advantage in plain])
    found = ppo_advantages(rewards, CONFIG.model_copy(update={"normalize_advantages": True}))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("return_lambda", [None, 1.0])
def test_returns_are_advantages_of_their_own_lambda_and_values(return_lambda: float | None) -> None:
    rewards = token_rewards()
    assert rewards.values_N is not None
    config = CONFIG.model_copy(update={"return_lambda": return_lambda, "normalize_advantages": True})
    expected = torch.tensor(dense(rewards, config, 0.9 if return_lambda is None else 1.0)) + rewards.values_N
    torch.testing.assert_close(ppo_returns(rewards, config), expected, rtol=1e-5, atol=1e-5)


def test_a_critic_that_says_nothing_gives_each_token_its_samples_reward() -> None:
    rewards = token_rewards(kl=False)
    silent = replace(rewards, values_N=torch.zeros(sum(LENGTHS)))
    config = objective(name="ppo", gae_lambda=1.0, normalize_advantages=False)
    assert torch.equal(ppo_advantages(silent, config), rewards.outcome_N)


def test_a_critic_that_knows_all_leaves_nothing_to_learn() -> None:
    rewards = token_rewards(kl=False)
    wise = replace(rewards, values_N=rewards.outcome_N)
    config = objective(name="ppo", normalize_advantages=False)
    assert not ppo_advantages(wise, config).any()
    assert torch.equal(ppo_returns(wise, config), rewards.outcome_N)


# --- GAE over packed sequences ------------------------------------------------------------------------------------


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


def test_the_last_of_each_sequence() -> None:
    assert last_of_each(torch.tensor([0, 0, 1, 2, 2])).tolist() == [False, True, True, False, True]
    empty = torch.zeros(0)
    assert gae_advantages(empty, empty, last_of_each(torch.zeros(0, dtype=torch.int64))).shape == (0,)


# --- the value loss -----------------------------------------------------------------------------------------------


def by_hand(value: float, old: float, target: float, clip: float) -> float:
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def test_the_value_loss_and_its_clip_fraction_by_hand() -> None:
    values, old, returns = [0.5, 1.0, -1.0, 0.1], [0.0, 0.0, 0.0, 0.0], [2.0, -1.0, -3.0, 0.3]
    loss = value_loss(torch.tensor(values), torch.tensor(old), torch.tensor(returns), 0.2)
    expected = [by_hand(*row, 0.2) for row in zip(values, old, returns, strict=True)]
    torch.testing.assert_close(loss.loss_N, torch.tensor(expected))
    assert loss.metrics["value/clip_fraction"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_the_value_losss_gradient_by_finite_differences() -> None:
    torch.manual_seed(2)
    values_N, old_N, returns_N = torch.randn(3, 32, dtype=torch.float64)

    def loss(values: Tensor) -> Tensor:
        return value_loss(values, old_N, returns_N, 0.3).loss_N

    assert torch.autograd.gradcheck(loss, (values_N.requires_grad_(),))


@pytest.mark.parametrize(("value", "gradient"), [(0.5, 0.0), (0.1, -1.9), (-0.5, -2.5)])
def test_a_value_that_moved_far_enough_towards_the_return_moves_no_further(value: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    value_loss(values, torch.zeros(1), torch.full((1,), 2.0), 0.2).loss_N.sum().backward()
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)


def test_before_the_first_update_and_without_a_clip_it_is_the_squared_error() -> None:
    values_N, returns_N = torch.randn(2, 16)
    squared_N = 0.5 * (values_N - returns_N).square()
    assert torch.equal(value_loss(values_N, values_N, returns_N, 0.2).loss_N, squared_N)
    assert torch.equal(value_loss(values_N, torch.zeros(16), returns_N, None).loss_N, squared_N)
