"""The clipped value loss against the formula in Python, by finite differences, and where its gradient is none."""

from __future__ import annotations

import pytest
import torch

from octetrl.algorithms.value_loss import value_loss


def by_hand(value: float, old: float, target: float, clip: float) -> float:
    near = min(max(value, old - clip), old + clip)
    return 0.5 * max((value - target) ** 2, (near - target) ** 2)


def test_loss_and_clip_fraction_by_hand() -> None:
    values, old, returns = [0.5, 1.0, -1.0, 0.1], [0.0, 0.0, 0.0, 0.0], [2.0, -1.0, -3.0, 0.3]
    loss = value_loss(torch.tensor(values), torch.tensor(old), torch.tensor(returns), 0.2)
    expected = [by_hand(*row, 0.2) for row in zip(values, old, returns, strict=True)]
    torch.testing.assert_close(loss.loss_N, torch.tensor(expected))
    assert loss.metrics["value/clip_fraction"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_gradient_by_finite_differences() -> None:
    torch.manual_seed(2)
    values_N, old_N, returns_N = torch.randn(3, 32, dtype=torch.float64)

    def loss(values: torch.Tensor) -> torch.Tensor:
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
