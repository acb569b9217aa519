"""RMSNorm against transformers' layer, a float64 reference, and itself in another batch."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octetrl.kernels.rows.rms_norm import rms_norm, rms_norm_reference, rms_norm_triton

EPS = 1e-6


def _inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 3
    weight = 1 + 0.1 * torch.randn(shape[-1], generator=generator)
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("shape", [(5, 96), (3, 2, 32), (1, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight_C = _inputs(shape, dtype)
    theirs = LlamaRMSNorm(shape[-1], EPS).to(dtype)
    theirs.weight.data.copy_(weight_C)
    torch.testing.assert_close(
        rms_norm(x, weight_C, EPS), theirs(x), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=0
    )


def test_is_near_float64() -> None:
    x, weight_C = _inputs((7, 128), torch.float32)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight_C.double()
    torch.testing.assert_close(rms_norm(x, weight_C, EPS).double(), exact, rtol=3e-7, atol=0)


def test_a_row_does_not_see_its_batch() -> None:
    x, weight_C = _inputs((3000, 96), torch.bfloat16)
    whole = rms_norm_reference(x, weight_C, EPS)
    for row in (0, 1, 2729, 2730, 2999):
        assert torch.equal(rms_norm_reference(x[row : row + 1], weight_C, EPS)[0], whole[row])


def test_takes_a_view_of_the_fused_qkv() -> None:
    x, weight_C = _inputs((4, 6, 32), torch.bfloat16)
    view = x[:, 2:5]
    assert torch.equal(rms_norm(view, weight_C, EPS), rms_norm(view.contiguous(), weight_C, EPS))


@pytest.mark.parametrize("shape", [(5, 96), (3, 2, 32)])
def test_gradients_equal_autograd_in_float64(shape: tuple[int, ...]) -> None:
    x, weight_C = _inputs(shape, torch.float32)
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x64, weight64 = x.double().requires_grad_(), weight_C.double().requires_grad_()
    (x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + EPS) * weight64).backward(dy.double())
    x.requires_grad_()
    weight_C.requires_grad_()
    rms_norm(x, weight_C, EPS).backward(dy)
    assert x.grad is not None and weight_C.grad is not None
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight_C.grad.double(), weight64.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 96), (3, 2, 32), (1, 1000), (0, 96)])
def test_kernel_is_near_the_reference(shape: tuple[int, ...]) -> None:
    x, weight_C = _inputs(shape, torch.float32)
    torch.testing.assert_close(
        rms_norm_triton(x, weight_C, EPS), rms_norm_reference(x, weight_C, EPS), rtol=1e-6, atol=0
    )
    if x.dim() == 3:
        view = x[:, 1:]
        expected = rms_norm_reference(view, weight_C, EPS)
        torch.testing.assert_close(rms_norm_triton(view, weight_C, EPS), expected, rtol=1e-6, atol=0)
