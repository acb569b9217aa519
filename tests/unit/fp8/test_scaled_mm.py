"""scaled_mm's padding without a GPU: a double asserts cuBLASLt's demands and multiplies the values of the codes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.fp8.backends import fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad
from octetrl.fp8.format import BLOCK, decode_e4m3
from octetrl.fp8.quantize import (
    Quantized,
    quantize_activation_reference,
    quantize_tokens_reference,
    quantize_weight_reference,
)
from octetrl.fp8.relative_error import relative_error

EVEN = (64, 256, 384)
ODD = [(1, 128, 128), (33, 576, 960), (70, 300, 500), (35, 192, 8000), (64, 4000, 192)]


def double(
    a_MK: Tensor, b_KN: Tensor, a_scale: Tensor, _a_recipe: object, b_scale: Tensor, b_recipe: object, **kwargs: object
) -> Tensor:
    """`F.scaled_mm` as fp8/scaled_mm.py calls it."""
    (rows, depth), columns, blocks = a_MK.shape, b_KN.shape[1], a_MK.shape[1] // BLOCK
    square = b_recipe == F.ScalingType.BlockWise128x128
    assert a_MK.is_contiguous() and b_KN.t().is_contiguous(), "a is row-major, b column-major"
    assert rows >= 32 and rows % 4 == 0 and depth % BLOCK == 0 and columns % (BLOCK if square else 16) == 0
    assert a_scale.shape == (rows, blocks) and a_scale.stride(0) == 1
    assert blocks == 1 or a_scale.stride(1) == rows
    if square:
        padded_blocks = -(-blocks // 4) * 4
        assert b_scale.shape == (padded_blocks, columns // BLOCK) and b_scale.stride(0) == 1
        b_scale_NB = b_scale[:blocks].t().repeat_interleave(BLOCK, 0)
    else:
        assert b_scale.shape == (columns, blocks) and b_scale.stride(0) == 1
        b_scale_NB = b_scale
    a = decode_e4m3(a_MK, torch.float64) * a_scale.repeat_interleave(BLOCK, 1)
    b = decode_e4m3(b_KN.t(), torch.float64) * b_scale_NB.repeat_interleave(BLOCK, 1)
    return (a @ b.t()).to(kwargs["output_dtype"])  # type: ignore[call-overload,no-any-return]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("m", "k", "n"), [EVEN, *ODD])
def test_results_are_contiguous_and_the_emulations_whatever_was_padded(
    m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", double)
    x, w, dy = randn(m, k, seed=0), quantize_weight_reference(randn(n, k, seed=1)), randn(m, n, seed=2)
    x8, dy8 = quantize_activation_reference(x), quantize_activation_reference(dy)
    w8_transposed = Quantized(w.codes.t().contiguous(), w.scale.t())
    dy_tokens = quantize_tokens_reference(dy)
    products = {
        "nt": (fp8_gemm_nt, x8, w),
        "dgrad": (fp8_gemm_dgrad, dy8, w8_transposed),
        "wgrad": (fp8_gemm_wgrad, dy_tokens, quantize_tokens_reference(x)),
        "square wgrad": (fp8_gemm_wgrad, dy_tokens, quantize_tokens_reference(x, square=True)),
    }
    for name, (gemm, a, b) in products.items():
        for dtype in (torch.bfloat16, torch.float32):
            got, want = gemm(a, b, "scaled_mm", dtype), gemm(a, b, "emulated", torch.float32)
            assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous(), f"{name} {dtype}"
            assert relative_error(got, want) < 4e-3, f"{name} {dtype}"
