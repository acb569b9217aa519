"""The GPU's own instructions against what they stand for: conversions to the bit, the sigmoid to its last ones."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from octetrl.fp8.format import E4M3
from octetrl.kernels.instructions import bf16_to_float, e4m3_code, e4m3_to_bf16, sigmoid, to_bf16
from octetrl.kernels.optimizer.add_gradient import add_gradient

pytestmark = pytest.mark.gpu
N = 1024


@triton.jit
def _each_kernel(x_ptr, narrow_ptr, sigmoid_ptr, wide_ptr, rounded_ptr, code_ptr, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + place)
    tl.store(sigmoid_ptr + place, sigmoid(x, True))
    tl.store(wide_ptr + place, bf16_to_float(tl.load(narrow_ptr + place), True))
    tl.store(rounded_ptr + place, bf16_to_float(to_bf16(x, True), True, True))
    tl.store(code_ptr + place, e4m3_code(x, True))


def test_every_bf16_value_and_many_between() -> None:
    """All 65,536 BF16 patterns, infinite and not numbers included, and float32 values a little above them."""
    narrow = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16)
    between = (narrow.float().view(torch.int32) + 0x7FFF).view(torch.float32)
    for x in (narrow.float(), between):
        got = [torch.empty_like(x) for _ in range(3)]
        codes = torch.empty(x.shape, dtype=torch.uint8, device="cuda")
        _each_kernel[(x.numel() // N,)](x, narrow, *got, codes, N=N)
        exact = torch.sigmoid(x.double())
        usual = x.isfinite() & (exact > 1.2e-38)
        # The exponent x log2(e) is a product, rounded to 2^-24 of itself, of a constant off by 2^-26: |x| times that.
        bound = 2**-21 + x.double().clamp(max=0).abs() * 1.25 * 2**-24
        assert ((got[0].double() - exact).abs() / exact / bound)[usual].max() < 1
        assert (got[0][x < -88] == 0).all() and got[0][x.isnan()].isnan().all()
        numbers = ~narrow.isnan()
        assert torch.equal(got[1][numbers], narrow.float()[numbers]) and got[1][~numbers].isnan().all()
        numbers = ~x.isnan()
        assert torch.equal(got[2][numbers], x.bfloat16().float()[numbers]) and got[2][~numbers].isnan().all()
        assert torch.equal(codes[numbers], x.clamp(-448, 448).to(E4M3).view(torch.uint8)[numbers])
        assert (codes[~numbers] & 0x7F == 0x7F).all()


@triton.jit
def _code_kernel(code_ptr, value_ptr):
    place = tl.arange(0, 1024)
    tl.store(value_ptr + place, e4m3_to_bf16(tl.load(code_ptr + place), True))


def test_every_e4m3_code() -> None:
    codes = torch.arange(1024, device="cuda").to(torch.uint8).view(E4M3)
    values = torch.empty(1024, dtype=torch.bfloat16, device="cuda")
    _code_kernel[(1,)](codes, values)
    numbers = ~codes.float().isnan()
    assert torch.equal(values[numbers].view(torch.int16), codes.bfloat16()[numbers].view(torch.int16))
    assert values[~numbers].tolist() == [480.0, -480.0] * 4


@pytest.mark.parametrize("shape", [(1,), (4096, 12288), (1001, 37)])
def test_gradients_add_up_as_torch_adds_them(shape: tuple[int, ...]) -> None:
    sum_, gradient = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda").bfloat16()
    want = sum_ + gradient
    add_gradient(sum_, gradient)
    assert torch.equal(sum_, want)
