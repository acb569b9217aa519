"""The MXFP8 product, interpreted: tiles, ragged edges and E8M0's bytes. `tl.dot_scaled` is that of interpreting.py, so
Blackwell's own sums are not tested."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.mxfp8 import quantize_mx_reference
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.mxfp8_gemm import mxfp8_gemm, mxfp8_gemm_reference, mxfp8_gemm_triton
from octetrl.layers.linear import Float8Linear


def operands(m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    generator = torch.Generator().manual_seed(m + n + k)
    x_MK = torch.randn(m, k, generator=generator) * torch.logspace(-9, 9, k)
    w_NK = torch.randn(n, k, generator=generator) * torch.logspace(-9, 9, n)[:, None]
    return quantize_mx_reference(x_MK), quantize_mx_reference(w_NK)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (5, 33, 32), (130, 70, 160), (70, 1, 1), (0, 4, 64)])
def test_kernel_has_the_bits_of_the_emulation(m: int, n: int, k: int) -> None:
    x, w = operands(m, n, k)
    y_MN = mxfp8_gemm_triton(x, w, torch.float32)
    assert torch.equal(y_MN, mxfp8_gemm_reference(x, w, torch.float32))


def test_scales_may_have_any_strides_and_y_another_type() -> None:
    x, w = operands(6, 40, 64)
    strided = Quantized(x.codes, x.scale.t().contiguous().t())
    y_MN = mxfp8_gemm_triton(strided, w)
    assert y_MN.dtype == torch.bfloat16
    torch.testing.assert_close(y_MN, mxfp8_gemm_reference(x, w), rtol=1e-2, atol=0)


def test_a_scale_that_is_nan_poisons_its_row_and_no_other() -> None:
    x, w = operands(6, 40, 64)
    x.scale[2, 1] = torch.nan
    y_MN = mxfp8_gemm_triton(x, w, torch.float32)
    assert y_MN.isnan().all(1).tolist() == [row == 2 for row in range(6)] and not y_MN[3].isnan().any()


def test_a_cpu_has_the_emulation_in_all_three_gemms() -> None:
    x, w = operands(3, 8, 40)
    assert torch.equal(mxfp8_gemm(x, w), mxfp8_gemm_reference(x, w))
    generator = torch.Generator().manual_seed(1)
    weight_NK, x_MK = (torch.randn(size, 96, generator=generator).bfloat16() for size in (40, 70))
    found = []
    for backend in ("dot_scaled", "mxfp8"):
        linear = Float8Linear(96, 40, backend=backend)  # type: ignore[arg-type]
        with torch.no_grad():
            linear.weight.copy_(weight_NK)  # type: ignore[union-attr]
        linear.requantize()
        x_MK = x_MK.detach().requires_grad_()
        y_MN = linear(x_MK)
        y_MN.sum().backward()
        found.append((y_MN, x_MK.grad, linear.weight.grad))  # type: ignore[union-attr]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert torch.equal(found[0][0], found[1][0])
