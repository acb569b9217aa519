"""SiLU(gate) * up against torch, float64, and itself in another batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from octetrl.kernels.rows.silu_mul import (
    silu_mul,
    silu_mul_backward_reference,
    silu_mul_backward_triton,
    silu_mul_reference,
    silu_mul_triton,
)


def _gate_up(num_tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (4 * torch.randn(num_tokens, 2 * size, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_formula_rounded_once(dtype: torch.dtype) -> None:
    gate_up_T2F = _gate_up(9, 37, dtype)
    gate_TF, up_TF = gate_up_T2F.double().chunk(2, dim=-1)
    expected_TF = (silu(gate_TF) * up_TF).to(dtype)
    torch.testing.assert_close(
        silu_mul(gate_up_T2F), expected_TF, rtol=3e-7 if dtype == torch.float32 else 8e-3, atol=0
    )


def test_extremes_stay_finite() -> None:
    gate_up_T2F = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]])
    assert silu_mul(gate_up_T2F).tolist() == [[0.0, 2e4, 0.0]]


def test_a_row_does_not_see_its_batch() -> None:
    gate_up_T2F = _gate_up(700, 101, torch.bfloat16)
    alone_TF = torch.cat([silu_mul(row_12F) for row_12F in gate_up_T2F.split(1)])
    assert torch.equal(alone_TF, silu_mul(gate_up_T2F))


def test_gradient_equals_autograd_in_float64() -> None:
    gate_up_T2F = _gate_up(9, 37, torch.float32)
    dy_TF = torch.randn(9, 37, generator=torch.Generator().manual_seed(1))
    exact_T2F = gate_up_T2F.double().requires_grad_()
    gate_TF, up_TF = exact_T2F.chunk(2, dim=-1)
    (silu(gate_TF) * up_TF).backward(dy_TF.double())
    gate_up_T2F.requires_grad_()
    silu_mul(gate_up_T2F).backward(dy_TF)
    assert gate_up_T2F.grad is not None
    torch.testing.assert_close(gate_up_T2F.grad.double(), exact_T2F.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [37, 1500])
def test_kernels_are_near_the_reference(size: int) -> None:
    gate_up_T2F, dy_TF = _gate_up(3, size, torch.float32), _gate_up(3, size, torch.float32)[:, :size].contiguous()
    expected_TF, expected_T2F = silu_mul_reference(gate_up_T2F), silu_mul_backward_reference(gate_up_T2F, dy_TF)
    torch.testing.assert_close(silu_mul_triton(gate_up_T2F), expected_TF, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(silu_mul_backward_triton(gate_up_T2F, dy_TF), expected_T2F, rtol=1e-5, atol=1e-5)
