"""MXFP8's quantiser against a definition of its own in exact arithmetic; its products, and the linear's three GEMMs."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import pytest
import torch

from octetrl.fp8.backends import fp8_gemm_nt
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.format import E4M3, MX_BLOCK
from octetrl.fp8.mxfp8 import dequantize_mx, quantize_mx_reference, quantize_mx_values
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.quantize import Quantized
from octetrl.layers.linear import Float8Linear
from octetrl.layers.stacked import Float8StackedLinear, group_rows

Rounding = Literal["up", "ocp"]
VALUES = [Fraction(value) for value in torch.arange(127, dtype=torch.uint8).view(E4M3).tolist()]  # 0 to 448
PLACE = dict(zip(VALUES, range(127), strict=True))


def exponent(amax: Fraction, rounding: Rounding) -> int:
    """Of the scale: the least power of two that saturates nothing, or OCP's floor(log2(amax)) - 8."""
    one = Fraction(2)
    low = math.frexp(amax)[1] - 1 - 8
    assert one ** (low + 8) <= amax < one ** (low + 9)
    if rounding == "up":
        low += amax / one**low > 448
    return min(max(low, -126), 119)


def nearest(x: Fraction) -> Fraction:
    """The E4M3 value nearest to |x|, at most 448; of two as near, the one with an even last bit."""
    return min(VALUES, key=lambda value: (abs(value - x), PLACE[value] % 2))


@pytest.mark.parametrize("rounding", ["up", "ocp"])
@pytest.mark.parametrize("size", [1.0, 3e-39, 1e-36, 1.1e37, 2.9e38])
def test_codes_and_scales_are_those_of_the_definition(rounding: Rounding, size: float) -> None:
    x_MK = ((2 * torch.rand(6, 80, generator=torch.Generator().manual_seed(3)) - 1) * size).bfloat16()
    x_MK[0, :MX_BLOCK] = 0
    found = quantize_mx_reference(x_MK, rounding)
    assert found.scale.shape == (6, 3)
    for row in range(6):
        for block in range(3):
            part = slice(block * MX_BLOCK, (block + 1) * MX_BLOCK)
            values = [Fraction(value) for value in x_MK[row, part].tolist()]
            amax = max(map(abs, values))
            scale = Fraction(2) ** exponent(amax, rounding) if amax else Fraction(1)
            assert Fraction(found.scale[row, block].item()) == scale
            codes = [math.copysign(nearest(min(abs(value) / scale, Fraction(448))), value) for value in values]
            assert found.codes[row, part].float().tolist() == codes
    if rounding == "up":
        values = quantize_mx_values(x_MK)
        assert torch.equal(values.codes, found.codes.float()) and torch.equal(values.scale, found.scale)


def test_the_two_roundings_differ_where_the_largest_value_would_saturate() -> None:
    x_MK = torch.tensor([1.0, 1.75, 1.7578125, 1.9921875])[:, None].expand(4, MX_BLOCK).contiguous()
    up, ocp = quantize_mx_reference(x_MK), quantize_mx_reference(x_MK, "ocp")
    assert up.scale.flatten().tolist() == [2**-8, 2**-8, 2**-7, 2**-7]
    assert ocp.scale.flatten().tolist() == [2**-8] * 4
    assert dequantize_mx(ocp)[:, 0].tolist() == [1.0, 1.75, 1.75, 1.75]
    assert dequantize_mx(up)[:, 0].tolist() == [1.0, 1.75, 1.75, 2.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_value_that_is_not_finite_poisons_its_block_and_no_other(bad: float) -> None:
    x_MK = torch.ones(1, 64)
    x_MK[0, 40] = bad
    found = quantize_mx_reference(x_MK)
    assert found.scale.isnan().tolist() == [[False, True]]
    assert found.codes.view(torch.uint8)[0, MX_BLOCK:].unique().tolist() == [0x7F]
    linear = Float8Linear(64, 1, backend="mxfp8")
    with torch.no_grad():
        linear.weight.copy_(x_MK)
    with pytest.raises(NonFiniteError, match="there"):
        linear.requantize("there")


def operands(rows: int, columns: int, depth: int) -> tuple[Quantized, Quantized]:
    generator = torch.Generator().manual_seed(5)
    x_MK, w_NK = (torch.randn(size, depth, generator=generator).bfloat16() for size in (rows, columns))
    return quantize_mx_values(x_MK * 10 ** torch.randn(rows, 1, generator=generator)), quantize_mx_reference(w_NK)


def test_a_product_adds_blocks_of_32_in_ascending_order_whatever_the_batch() -> None:
    x, w = operands(5, 9, 100)
    y_MN = fp8_gemm_nt(x, w, "mxfp8", torch.float32)
    want_MN = torch.zeros(5, 9)
    for block in range(4):
        part = slice(block * MX_BLOCK, (block + 1) * MX_BLOCK)
        sums_MN = (x.codes[:, part].double()[:, None] * w.codes[:, part].double()[None]).sum(2).float()
        scale_MN = x.scale[:, block, None] * w.scale[:, block]
        want_MN = (want_MN.double() + sums_MN.double() * scale_MN.double()).float()
    assert torch.equal(y_MN, want_MN)
    exact_MN = dequantize_mx(x).double() @ dequantize_mx(w).double().t()
    assert float((y_MN - exact_MN).norm() / exact_MN.norm()) < 1e-6
    for rows in ([3], [4, 3, 0]):
        alone = fp8_gemm_nt(Quantized(x.codes[rows], x.scale[rows]), w, "mxfp8", torch.float32)
        assert torch.equal(alone, y_MN[rows])


def trained(linear: Float8Linear, x: torch.Tensor, *groups: object) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = linear(x, *groups)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    grads = [one.grad for one in (x, linear.weight) if one is not None]
    return y.detach(), *(grad for grad in grads if grad is not None)


def test_the_three_gemms_of_a_linear_have_codes_along_their_sums() -> None:
    generator = torch.Generator().manual_seed(2)
    x_MK, linear = torch.randn(70, 96, generator=generator).bfloat16(), Float8Linear(96, 40, backend="mxfp8")
    linear.requantize()
    y_MN, dx_MK, dw_NK = trained(linear, x_MK)
    dy_MN = torch.randn(y_MN.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    w_NK = linear.weight.detach()

    def through(values: torch.Tensor) -> torch.Tensor:
        return dequantize_mx(quantize_mx_reference(values))

    want = {
        "y": (y_MN, through(x_MK) @ through(w_NK).t()),
        "dx": (dx_MK, through(dy_MN) @ through(w_NK.t()).t()),
        "dw": (dw_NK, through(dy_MN.t()) @ through(x_MK.t()).t()),
    }
    for name, (found, expected) in want.items():
        assert (found == expected.bfloat16()).float().mean() > 0.99, name  # float32 sums: now and then another rounding
    linear.release_codes()
    again = linear.dgrad_operand()
    linear.requantize()
    assert all(torch.equal(*pair) for pair in zip(again, linear.dgrad_operand(), strict=True))
    linear.weight.requires_grad_(False)
    linear.drop_weight()
    assert torch.equal(trained(linear, x_MK)[1], dx_MK), "a frozen weight's codes stay"


def test_experts_have_blocks_of_their_own_in_both_directions() -> None:
    """40 rows of an expert: its second block along N is ragged, and the next expert's first begins behind it."""
    stacked = Float8StackedLinear(64, 40, 3, backend="mxfp8")
    stacked.requantize()
    assert stacked.scale.shape == (120, 2) and stacked.dgrad_operand().scale.shape == (64, 6)
    expert_TS = torch.tensor([[0], [2], [2], [1]])
    groups = group_rows(expert_TS, 3)
    x_PK = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()[groups.token_P]
    y_PN, dx_PK, _ = trained(stacked, x_PK, groups)
    dy_PN = torch.randn(y_PN.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for row, expert in enumerate(sorted(expert_TS.flatten().tolist())):
        alone = Float8Linear(64, 40, backend="mxfp8")
        with torch.no_grad():
            alone.weight.copy_(stacked.weight.detach()[expert * 40 : expert * 40 + 40])
        alone.requantize()
        x = x_PK[[row]].clone().requires_grad_()
        y = alone(x)
        y.backward(dy_PN[[row]])
        assert torch.equal(y[0], y_PN[row]) and torch.equal(x.grad[0], dx_PK[row])


def test_a_device_without_its_gemm_emulates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {choose_backend(device, mx=True) for device in ("cpu", "meta")} == {"mxfp8"}
    for capability, backend in (
        ((9, 0), "mxfp8"),
        ((10, 0), "dot_scaled"),
        ((10, 3), "dot_scaled"),
        ((12, 0), "mxfp8"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert choose_backend("cuda", mx=True) == backend
        assert choose_backend("cuda", True, mx=True) == "mxfp8"
