"""DPO, cDPO, IPO and Bradley-Terry against the papers' formulas, pair by pair in float64, and in special cases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.bradley_terry import bradley_terry_loss
from octetrl.algorithms.dpo import preference_loss
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.weighting import weigh
from tests.objectives import objective

LENGTHS = [3, 5, 2, 7, 4, 1]  # of the answers; a pair each two
CHOSEN = [True, False, False, True, True, False]


def inputs_of(logprobs_N: Tensor, reference_N: Tensor) -> LossInputs:
    counts = torch.tensor(LENGTHS)
    return LossInputs(
        logprobs_N=logprobs_N,
        entropy_N=torch.zeros_like(logprobs_N),
        advantages_N=torch.ones_like(logprobs_N),
        sequence_N=torch.arange(len(LENGTHS)).repeat_interleave(counts),
        num_sequences=len(LENGTHS),
        reference_logprobs_N=reference_N,
        chosen_N=torch.tensor(CHOSEN).repeat_interleave(counts),
    )


def random_inputs(scale: float = 1.0) -> LossInputs:
    draw = torch.Generator().manual_seed(3)
    logprobs_N = -scale * torch.rand(sum(LENGTHS), generator=draw) - 0.1
    reference_N = -scale * torch.rand(sum(LENGTHS), generator=draw) - 0.1
    return inputs_of(logprobs_N.requires_grad_(), reference_N)


def reduced(result: TokenLoss) -> tuple[Tensor, dict[str, float]]:
    """As the trainer does it: the loss with sequence weights, a metric as the mean over its pairs."""
    weights, denominator = weigh(LENGTHS, "sequence")
    weights_N = torch.tensor([weight for weight, n in zip(weights, LENGTHS, strict=True) for _ in range(n)])
    metrics = {name: float(values_P.mean()) for name, values_P in result.metrics.items()}
    return (weights_N * result.loss_N).sum() / denominator, metrics


def dense(logprobs_N: Tensor, reference_N: Tensor, kind: str, beta: float, wrong: float) -> tuple[Tensor, list[Tensor]]:
    """The mean over pairs from the formulas, in float64."""
    ratios = [part.sum() for part in (logprobs_N - reference_N).split(LENGTHS)]
    losses, differences = [], []
    for first in range(0, len(LENGTHS), 2):
        better, worse = (first, first + 1) if CHOSEN[first] else (first + 1, first)
        h = ratios[better] - ratios[worse]
        right, left = torch.log(1 / (1 + torch.exp(-beta * h))), torch.log(1 / (1 + torch.exp(beta * h)))
        losses.append((h - 1 / (2 * beta)) ** 2 if kind == "ipo" else -(1 - wrong) * right - wrong * left)
        differences.append(h.detach())
    return torch.stack(losses).mean(), differences


@pytest.mark.parametrize(("name", "beta", "wrong"), [("dpo", 0.1, 0.0), ("dpo", 0.7, 0.2), ("ipo", 0.3, 0.0)])
def test_value_gradient_and_metrics_are_the_formulas(name: str, beta: float, wrong: float) -> None:
    inputs = random_inputs()
    config = objective(name=name, preference_beta=beta, **({"label_smoothing": wrong} if wrong else {}))
    loss, metrics = reduced(preference_loss(inputs, config))
    loss.backward()
    exact_N = inputs.logprobs_N.detach().double().requires_grad_()
    assert inputs.reference_logprobs_N is not None and inputs.logprobs_N.grad is not None
    expected, differences = dense(exact_N, inputs.reference_logprobs_N.double(), name, beta, wrong)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(inputs.logprobs_N.grad.double(), exact_N.grad, rtol=1e-5, atol=1e-7)
    assert metrics["preference/margin"] == pytest.approx(beta * sum(map(float, differences)) / 3, rel=1e-4)
    assert metrics["preference/accuracy"] == pytest.approx(sum(h > 0 for h in differences) / 3)
    sums = [float(part.sum()) for part in exact_N.split(LENGTHS)]
    assert metrics["preference/chosen_logprob"] == pytest.approx((sums[0] + sums[3] + sums[4]) / 3, rel=1e-5)
    assert metrics["preference/rejected_logprob"] == pytest.approx((sums[1] + sums[2] + sums[5]) / 3, rel=1e-5)
    margin = metrics["preference/chosen_reward"] - metrics["preference/rejected_reward"]
    assert margin == pytest.approx(metrics["preference/margin"], rel=1e-4)


@pytest.mark.parametrize(("name", "expected"), [("dpo", math.log(2)), ("ipo", 25.0)])
def test_at_the_reference_nothing_is_known(name: Any, expected: float) -> None:
    logprobs_N = random_inputs().logprobs_N
    result = preference_loss(inputs_of(logprobs_N, logprobs_N.detach()), objective(name=name))
    loss, metrics = reduced(result)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["preference/accuracy"] == 0.0 and metrics["preference/margin"] == 0.0


def test_far_from_the_reference_it_stays_finite() -> None:
    inputs = random_inputs(scale=1e4)
    loss, _ = reduced(preference_loss(inputs, objective(name="dpo", preference_beta=10.0)))
    loss.backward()
    assert loss.isfinite() and inputs.logprobs_N.grad is not None and inputs.logprobs_N.grad.isfinite().all()


def test_a_pair_apart_is_our_bug() -> None:
    inputs = random_inputs()
    assert inputs.chosen_N is not None
    with pytest.raises(AssertionError, match="neighbours"):
        preference_loss(replace(inputs, chosen_N=torch.ones_like(inputs.chosen_N)), objective(name="dpo"))


# --- the reward model's loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_a_reward_models_loss_by_hand(center: float) -> None:
    chosen, rejected = [1.0, -2.0, 0.5, 30.0], [0.0, 1.5, 0.5, -30.0]
    loss = bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected), center)
    expected = [
        -math.log(1.0 / (1.0 + math.exp(r - c))) + center * (c + r) ** 2 for c, r in zip(chosen, rejected, strict=True)
    ]
    torch.testing.assert_close(loss.loss_N, torch.tensor(expected))
    assert loss.metrics["preference/accuracy"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert loss.metrics["preference/margin"].tolist() == [1.0, -3.5, 0.0, 60.0]


def test_a_reward_models_gradient_by_finite_differences() -> None:
    chosen_P, rejected_P = torch.randn(2, 8, dtype=torch.float64)
    given = (chosen_P.requires_grad_(), rejected_P.requires_grad_())
    assert torch.autograd.gradcheck(lambda chosen, rejected: bradley_terry_loss(chosen, rejected, 0.05).loss_N, given)


def test_only_the_difference_of_rewards_counts() -> None:
    chosen_P, rejected_P = torch.randn(2, 8, dtype=torch.float64)
    shifted = bradley_terry_loss(chosen_P + 5.0, rejected_P + 5.0).loss_N
    torch.testing.assert_close(shifted, bradley_terry_loss(chosen_P, rejected_P).loss_N)


def test_a_hopeless_pair_is_finite() -> None:
    chosen = torch.tensor([-1e4], requires_grad=True)
    loss_N = bradley_terry_loss(chosen, torch.tensor([1e4])).loss_N
    loss_N.sum().backward()
    assert loss_N.item() == 2e4
    assert chosen.grad is not None and chosen.grad.item() == -1.0
