"""The reward model's loss against the formula in float64, its gradient, and its special cases."""

from __future__ import annotations

import math

import pytest
import torch

from octetrl.algorithms.bradley_terry import bradley_terry_loss


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_loss_by_hand(center: float) -> None:
    chosen, rejected = [1.0, -2.0, 0.5, 30.0], [0.0, 1.5, 0.5, -30.0]
    loss = bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected), center)
    expected = [
        -math.log(1.0 / (1.0 + math.exp(r - c))) + center * (c + r) ** 2 for c, r in zip(chosen, rejected, strict=True)
    ]
    torch.testing.assert_close(loss.loss_N, torch.tensor(expected))
    assert loss.metrics["preference/accuracy"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert loss.metrics["preference/margin"].tolist() == [1.0, -3.5, 0.0, 60.0]


def test_gradient_by_finite_differences() -> None:
    chosen_P, rejected_P = torch.randn(2, 8, dtype=torch.float64)
    given = (chosen_P.requires_grad_(), rejected_P.requires_grad_())
    assert torch.autograd.gradcheck(lambda chosen, rejected: bradley_terry_loss(chosen, rejected, 0.05).loss_N, given)


def test_equal_rewards_have_the_loss_of_a_coin() -> None:
    loss = bradley_terry_loss(torch.full((1,), 3.0), torch.full((1,), 3.0))
    assert loss.loss_N.item() == pytest.approx(math.log(2))


def test_only_the_difference_counts() -> None:
    chosen_P, rejected_P = torch.randn(2, 8, dtype=torch.float64)
    shifted = bradley_terry_loss(chosen_P + 5.0, rejected_P + 5.0).loss_N
    torch.testing.assert_close(shifted, bradley_terry_loss(chosen_P, rejected_P).loss_N)


def test_a_hopeless_pair_is_finite() -> None:
    chosen = torch.tensor([-1e4], requires_grad=True)
    loss_N = bradley_terry_loss(chosen, torch.tensor([1e4])).loss_N
    loss_N.sum().backward()
    assert loss_N.item() == 2e4
    assert chosen.grad is not None and chosen.grad.item() == -1.0
