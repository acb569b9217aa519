"""The gradient of the sum of experts: the reference against autograd in float64, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows.combine_experts_backward import combine_experts_backward, combine_experts_backward_triton


@pytest.mark.parametrize("size", [48, 1100])
def test_gradients_are_those_of_the_sum(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    y_PE, dout_TE = torch.randn(30, size, generator=generator), torch.randn(10, size, generator=generator)
    weight_TS = torch.rand(10, 3, generator=generator)
    row_TS = torch.randperm(30, generator=generator).view(10, 3)
    wide_PE, wide_TS = y_PE.double().requires_grad_(), weight_TS.double().requires_grad_()
    (wide_PE[row_TS] * wide_TS[:, :, None]).sum(1).backward(dout_TE.double())
    for run in (combine_experts_backward, combine_experts_backward_triton):
        dy_PE, dweight_TS = run(dout_TE, y_PE, weight_TS, row_TS)
        torch.testing.assert_close(dy_PE.double(), wide_PE.grad)
        torch.testing.assert_close(dweight_TS.double(), wide_TS.grad, rtol=1e-4, atol=1e-4)
    assert torch.equal(dy_PE, combine_experts_backward(dout_TE, y_PE, weight_TS, row_TS)[0])


def test_no_tokens() -> None:
    none_TS = torch.zeros(0, 2)
    dy_PE, dweight_TS = combine_experts_backward(torch.zeros(0, 8), torch.zeros(0, 8), none_TS, none_TS.long())
    assert dy_PE.shape == (0, 8) and dweight_TS.shape == (0, 2)
