"""The clamped gate against torch, float64, and its kernels against the references."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.quantize import quantize_activation_reference
from octetrl.kernels.rows.clamped_glu import (
    clamped_glu,
    clamped_glu_backward_reference,
    clamped_glu_backward_triton,
    clamped_glu_quantize,
    clamped_glu_quantize_triton,
    clamped_glu_reference,
    clamped_glu_triton,
)
from tests.unit.kernels.fused_row_cases import assert_near, bytes_of, normal


def formula(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.double().chunk(2, -1)
    g_TF, u_TF = gate_TF.clamp(max=7.0), up_TF.clamp(-7.0, 7.0)
    return (u_TF + 1) * g_TF * torch.sigmoid(1.702 * g_TF)


def given(tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Some values beyond both borders, some on them."""
    gate_up_T2F = normal(tokens, 2 * size, dtype=dtype) * 5
    gate_up_T2F[:, 0], gate_up_T2F[:, size], gate_up_T2F[:, size + 1] = 7.0, 7.0, -7.0
    return gate_up_T2F.contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_the_formula_rounded_once_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    gate_up_T2F = given(9, 37, dtype)
    exact_T2F = gate_up_T2F.double().requires_grad_()
    want_TF = formula(exact_T2F)
    far = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(clamped_glu(gate_up_T2F), want_TF.to(dtype), rtol=far, atol=1e-6)
    assert want_TF.max() > 49, "clamped on both sides"
    dy_TF = normal(9, 37, dtype=dtype)
    want_TF.backward(dy_TF.double())
    gate_up_T2F.requires_grad_()
    clamped_glu(gate_up_T2F).backward(dy_TF)
    torch.testing.assert_close(gate_up_T2F.grad, exact_T2F.grad.to(dtype), rtol=10 * far, atol=1e-5)


def test_a_row_does_not_see_its_batch_and_nan_stays() -> None:
    gate_up_T2F = given(300, 101, torch.bfloat16)
    gate_up_T2F[0, 3], gate_up_T2F[0, 101 + 5] = torch.nan, torch.nan
    y_TF = clamped_glu(gate_up_T2F)
    alone_TF = torch.cat([clamped_glu(row_12F) for row_12F in gate_up_T2F.split(1)])
    assert torch.equal(alone_TF[1:], y_TF[1:])
    for first_F in (y_TF[0], clamped_glu_triton(gate_up_T2F[:1])[0]):
        assert first_F.isnan().nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("size", [37, 1500])
def test_kernels_are_near_the_references(size: int) -> None:
    gate_up_T2F, dy_TF = given(3, size, torch.float32), normal(3, size, dtype=torch.float32)
    got_T2F, want_T2F = (
        run(gate_up_T2F, dy_TF) for run in (clamped_glu_backward_triton, clamped_glu_backward_reference)
    )
    y_TF = clamped_glu_triton(gate_up_T2F)
    torch.testing.assert_close(y_TF, clamped_glu_reference(gate_up_T2F), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_T2F, want_T2F, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(3, 1024), (2, 720), (5, 80), (0, 128)])
def test_quantises_what_it_computes(shape: tuple[int, int], power_of_two: bool) -> None:
    gate_up_T2F = given(*shape, torch.float32)
    gate_up_T2F[:, 2:16] = 0
    assert_near(clamped_glu_quantize_triton(gate_up_T2F, power_of_two), clamped_glu_quantize(gate_up_T2F, power_of_two))
    gate_up_T2F = given(*shape, torch.bfloat16)
    want = quantize_activation_reference(clamped_glu(gate_up_T2F), power_of_two)
    assert bytes_of(clamped_glu_quantize(gate_up_T2F, power_of_two)) == bytes_of(want)
