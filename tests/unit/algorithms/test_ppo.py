"""PPO's advantages and returns against a dense float64 loop from the formulas, and what it equals in special cases."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from octetrl.algorithms.ppo import ppo_advantages, ppo_returns
from octetrl.algorithms.sequences import last_of_each
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.objective_settings import AlgorithmConfig
from tests.objectives import objective

LENGTHS = [4, 1, 9, 6]
CONFIG = objective(name="ppo", kl_coefficient=0.3, gae_lambda=0.9, discount=0.98, normalize_advantages=False)


def token_rewards(*, kl: bool = True) -> TokenRewards:
    sequence_N = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
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
