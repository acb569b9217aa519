"""RMSNorm against transformers' layer, float64, and itself in another batch; its backward against float64 autograd; the
kernels (interpreted) against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octetrl.kernels.rows.rms_norm import rms_norm, rms_norm_reference, rms_norm_triton
from octetrl.kernels.rows.rms_norm_backward import (
    rms_norm_backward,
    rms_norm_backward_reference,
    rms_norm_backward_triton,
)
from tests.unit.kernels.fused_row_cases import normal

pytestmark = pytest.mark.usefixtures("few_programs")

EPS = 1e-6
SHAPES = [(5, 96), (3, 2, 32), (1, 1000), (70, 4, 16)]


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, x, weight, the residual's gradient."""
    weight = 1 + 0.1 * normal(shape[-1], seed=3, dtype=dtype)
    dy, x, residual = (normal(*shape, seed=seed, dtype=dtype) for seed in range(3))
    return dy, 3 * x, weight, residual


def _formula(x: Tensor, weight_C: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight_C


def _exact(dy: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of float64 autograd."""
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    dx, dweight = torch.autograd.grad(_formula(x64, weight64), (x64, weight64), dy.double())
    return dx if residual is None else dx + residual.double(), dweight


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    _, x, weight_C, _ = _inputs(shape, dtype)
    theirs = LlamaRMSNorm(shape[-1], EPS).to(dtype)
    theirs.weight.data.copy_(weight_C)
    torch.testing.assert_close(
        rms_norm(x, weight_C, EPS), theirs(x), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0
    )


def test_is_near_float64() -> None:
    _, x, weight_C, _ = _inputs((7, 128), torch.float32)
    exact = _formula(x.double(), weight_C.double())
    torch.testing.assert_close(rms_norm(x, weight_C, EPS).double(), exact, rtol=3e-7, atol=0)


def test_beside_a_float32_weight_only_the_result_is_rounded() -> None:
    _, x, weight_C, _ = _inputs((64, 128), torch.bfloat16)
    wide_C = weight_C.float() + 2**-12  # no BF16
    exact = _formula(x.double(), wide_C.double())
    y = rms_norm(x, wide_C, EPS)
    assert y.dtype == torch.bfloat16 and ((y.double() - exact).abs() <= exact.abs() * 2**-7.99).all()


def test_a_row_does_not_see_its_batch() -> None:
    _, x, weight_C, _ = _inputs((3000, 96), torch.bfloat16)
    whole = rms_norm_reference(x, weight_C, EPS)
    for row in (0, 1, 2729, 2730, 2999):
        assert torch.equal(rms_norm_reference(x[row : row + 1], weight_C, EPS)[0], whole[row])


def test_takes_a_view_of_the_fused_qkv() -> None:
    _, x, weight_C, _ = _inputs((4, 6, 32), torch.bfloat16)
    view = x[:, 2:5]
    assert torch.equal(rms_norm(view, weight_C, EPS), rms_norm(view.contiguous(), weight_C, EPS))


@pytest.mark.parametrize("shape", [*SHAPES[:3], (0, 96)])
def test_kernel_is_near_the_reference(shape: tuple[int, ...]) -> None:
    _, x, weight_C, _ = _inputs(shape, torch.float32)
    torch.testing.assert_close(
        rms_norm_triton(x, weight_C, EPS), rms_norm_reference(x, weight_C, EPS), rtol=1e-6, atol=0
    )
    if x.dim() == 3:
        view = x[:, 1:]
        expected = rms_norm_reference(view, weight_C, EPS)
        torch.testing.assert_close(rms_norm_triton(view, weight_C, EPS), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_autograd_in_float64(shape: tuple[int, ...], with_residual: bool) -> None:
    dy, x, weight, residual = _inputs(shape)
    got = rms_norm_backward(dy, x, weight, EPS, residual if with_residual else None)
    if not with_residual:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        assert all(map(torch.equal, torch.autograd.grad(rms_norm(*leaves, EPS), leaves, dy), got))
    want = _exact(dy, x, weight, residual if with_residual else None)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-5, atol=1e-5)


def test_a_gradient_in_bf16_is_rounded_once() -> None:
    """Half a step of BF16 is at most 2^-8: a sum rounded before the residual is added would be further away."""
    dy, x, weight, residual = _inputs((64, 96), torch.bfloat16)
    dx, dweight = rms_norm_backward(dy, x, weight, EPS, residual)
    exact_dx, exact_dweight = _exact(dy, x, weight, residual)
    assert dx.dtype == dweight.dtype == torch.bfloat16
    assert ((dx.double() - exact_dx).abs() <= exact_dx.abs() * 2**-7.99 + 1e-6).all()
    assert ((dweight.double() - exact_dweight).abs() <= exact_dweight.abs() * 2**-7.99 + 1e-5).all()


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 96)])
def test_backwards_kernel_is_near_the_reference(shape: tuple[int, ...], with_residual: bool) -> None:
    dy, x, weight, residual = _inputs(shape)
    inputs = (dy, x, weight, EPS, residual if with_residual else None)
    got, want = rms_norm_backward_triton(*inputs), rms_norm_backward_reference(*inputs)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


def test_backwards_kernel_takes_views_of_heads() -> None:
    """Tokens and heads lie differently far apart in each input; a gradient may even be expanded."""
    dy, x, weight, residual = _inputs((9, 6, 32))
    views = (dy[:, 1:4], x[:, 3:], weight, EPS, residual[:, ::2])
    got, want = rms_norm_backward_triton(*views), rms_norm_backward_reference(*views)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    expanded = (torch.ones(()).expand(9, 3, 32), *views[1:])
    torch.testing.assert_close(
        rms_norm_backward_triton(*expanded), rms_norm_backward_reference(*expanded), rtol=1e-5, atol=1e-5
    )


def test_wrong_shapes_are_refused() -> None:
    dy, x, weight, residual = _inputs((5, 96))
    with pytest.raises(AssertionError, match="residual"):
        rms_norm_backward(dy, x, weight, EPS, residual[:4])
    with pytest.raises(AssertionError, match="rms_norm_backward"):
        rms_norm_backward(dy, x, weight[:95], EPS)
