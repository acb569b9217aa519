"""The sum of experts and its gradient: the references against a loop and autograd in float64, the kernels (interpreted)
against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.kernels.rows.combine_experts import combine_experts, combine_experts_triton
from octetrl.kernels.rows.combine_experts_backward import combine_experts_backward, combine_experts_backward_triton


def ten_of_three_slots(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The experts' rows, weights, where each slot's row stands, and numbers for each token."""
    generator = torch.Generator().manual_seed(0)
    y_PE, weight_TS = torch.randn(30, size, generator=generator), torch.rand(10, 3, generator=generator)
    row_TS = torch.randperm(30, generator=generator).view(10, 3)
    return y_PE, weight_TS, row_TS, torch.randn(10, size, generator=generator)


@pytest.mark.parametrize("has_shared", [False, True])
def test_the_order_is_that_of_the_slots(has_shared: bool) -> None:
    y_PE, weight_TS, row_TS, drawn_TE = ten_of_three_slots(1100)
    shared_TE = drawn_TE if has_shared else None
    found_TE = combine_experts(y_PE, weight_TS, row_TS, shared_TE)
    for token in range(10):
        sum_E = torch.zeros(1100)
        for slot in range(3):
            sum_E = sum_E + weight_TS[token, slot] * y_PE[row_TS[token, slot]]
        assert torch.equal(found_TE[token], sum_E if shared_TE is None else sum_E + shared_TE[token])
    assert torch.equal(combine_experts_triton(y_PE, weight_TS, row_TS, shared_TE), found_TE)


@pytest.mark.parametrize("size", [48, 1100])
def test_gradients_are_those_of_the_sum(size: int) -> None:
    y_PE, weight_TS, row_TS, dout_TE = ten_of_three_slots(size)
    wide_PE, wide_TS = y_PE.double().requires_grad_(), weight_TS.double().requires_grad_()
    (wide_PE[row_TS] * wide_TS[:, :, None]).sum(1).backward(dout_TE.double())
    for run in (combine_experts_backward, combine_experts_backward_triton):
        dy_PE, dweight_TS = run(dout_TE, y_PE, weight_TS, row_TS)
        torch.testing.assert_close(dy_PE.double(), wide_PE.grad)
        torch.testing.assert_close(dweight_TS.double(), wide_TS.grad, rtol=1e-4, atol=1e-4)
    assert torch.equal(dy_PE, combine_experts_backward(dout_TE, y_PE, weight_TS, row_TS)[0])


def test_no_tokens_have_empty_gradients() -> None:
    none_TS = torch.zeros(0, 2)
    dy_PE, dweight_TS = combine_experts_backward(torch.zeros(0, 8), torch.zeros(0, 8), none_TS, none_TS.long())
    assert dy_PE.shape == (0, 8) and dweight_TS.shape == (0, 2)
