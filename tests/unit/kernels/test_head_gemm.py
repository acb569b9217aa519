"""The products of heads: the reference against a written-out product, the kernel (interpreted) against the grouped one,
whose bits it has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import octetrl.kernels.gemm.head_gemm as module
from octetrl.fp8.quantize import quantize_activation_reference
from octetrl.kernels.gemm.grouped_bf16_gemm import NARROW, Part, grouped_bf16_gemm_triton
from octetrl.kernels.gemm.grouped_fp8_gemm import FEW, MANY, SOME, Tile
from octetrl.kernels.gemm.head_gemm import (
    CODES_TILES,
    can_run,
    choose_codes_tile,
    head_gemm,
    head_gemm_codes,
    head_gemm_codes_triton,
    head_gemm_triton,
)
from octetrl.kernels.quantize.quantize_activation import quantize_activation_triton
from tests.unit.kernels.fused_row_cases import bytes_of

HEADS, NOPE, ROTARY, VALUE, LATENT = 3, 64, 16, 40, 128
KEYS, VALUES = Part(0, NOPE), Part(NOPE)


def operands(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries' part without RoPE, a view; attention's result; and `kv_b`."""
    generator = torch.Generator().manual_seed(tokens)
    q_THX = torch.randn(tokens, HEADS, NOPE + ROTARY, generator=generator).bfloat16()
    o_THC = torch.randn(tokens, HEADS, LATENT, generator=generator).bfloat16()
    return q_THX[..., :NOPE], o_THC, torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=generator).bfloat16()


def by_groups(x_THK: Tensor, w: Tensor, tile: Tile, *, turned: bool, part: Part) -> Tensor:
    tokens, heads, depth = x_THK.shape
    first_H1 = torch.arange(0, heads * tokens + 1, tokens, dtype=torch.int32)
    x_PK = x_THK.transpose(0, 1).reshape(heads * tokens, depth).contiguous()
    y_PN = grouped_bf16_gemm_triton(x_PK, w, first_H1, tile, turned=turned, part=part)
    return y_PN.view(heads, tokens, -1).transpose(0, 1)


def test_each_head_is_multiplied_by_its_own_rows() -> None:
    q_THN, o_THC, kv_b = operands(5)
    w_HXC = kv_b.view(HEADS, NOPE + VALUE, LATENT).double()
    keys_THC = torch.einsum("thn,hnc->thc", q_THN.double(), w_HXC[:, :NOPE])
    values_THV = torch.einsum("thc,hvc->thv", o_THC.double(), w_HXC[:, NOPE:])
    torch.testing.assert_close(head_gemm(q_THN, kv_b, turned=True, part=KEYS), keys_THC.float().bfloat16())
    torch.testing.assert_close(head_gemm(o_THC, kv_b, part=VALUES), values_THV.float().bfloat16())
    assert head_gemm(o_THC[:0], kv_b, part=VALUES).shape == (0, HEADS, VALUE)


@pytest.mark.parametrize("tile", [FEW, SOME, MANY, NARROW])
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_kernel_has_the_bits_of_the_grouped_one(tokens: int, tile: Tile) -> None:
    q_THN, o_THC, kv_b = operands(tokens)
    for x_THK, turned, part in ((q_THN, True, KEYS), (o_THC, False, VALUES)):
        found = head_gemm_triton(x_THK, kv_b, turned=turned, part=part, tile=tile)
        assert found.is_contiguous() and torch.equal(found, by_groups(x_THK, kv_b, tile, turned=turned, part=part))
    by_head_THC = o_THC.transpose(0, 1).contiguous().transpose(0, 1)  # as prefill leaves it
    assert torch.equal(head_gemm_triton(by_head_THC, kv_b, part=VALUES, tile=tile), found)


def test_views_that_tma_cannot_read_are_known() -> None:
    q_THN, o_THC, kv_b = operands(4)
    assert can_run(q_THN, kv_b) and can_run(o_THC, kv_b)
    assert not can_run(torch.zeros(4, HEADS, NOPE + 4).bfloat16()[..., :NOPE], kv_b), "heads 136 bytes apart"
    assert not can_run(q_THN[..., 1:], kv_b), "begins within 16 bytes"
    assert not can_run(o_THC.transpose(1, 2), kv_b)
    by_head_THC = o_THC.transpose(0, 1).contiguous().transpose(0, 1)
    assert can_run(by_head_THC, kv_b) and can_run(by_head_THC[..., :96], kv_b)
    assert not can_run(o_THC[..., :96], kv_b), "a tile would reach into the next head"


def of_whole_blocks(tokens: int) -> tuple[Tensor, Tensor]:
    """Attention's result with rows of NaN, of infinity and of zeros, and `kv_b` with two blocks of values a head."""
    generator = torch.Generator().manual_seed(tokens)
    o_THC = torch.randn(tokens, HEADS, LATENT, generator=generator).bfloat16()
    if tokens > 2:
        o_THC[0, 1, 3], o_THC[1, 2, 0], o_THC[2] = torch.nan, torch.inf, 0
    return o_THC, torch.randn(HEADS * (NOPE + 256), LATENT, generator=generator).bfloat16()


def test_codes_are_those_of_the_product() -> None:
    o_THC, kv_b = of_whole_blocks(5)
    for power_of_two in (False, True):
        want = quantize_activation_reference(head_gemm(o_THC, kv_b, part=VALUES).flatten(1), power_of_two)
        assert bytes_of(head_gemm_codes(o_THC, kv_b, part=VALUES, power_of_two=power_of_two)) == bytes_of(want)


class Launches:
    """Stands for the kernel and counts its launches."""

    count = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.count += 1
        return lambda *operands, **options: None


def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(module, "_head_gemm_kernel", launches)
    for tokens in (2, 0):
        o_THC, kv_b = of_whole_blocks(tokens)
        assert head_gemm_triton(o_THC, kv_b, part=VALUES).shape == (tokens, HEADS, 256)
        assert head_gemm_codes_triton(o_THC, kv_b, part=VALUES).codes.shape == (tokens, HEADS * 256)
        assert launches.count == 2, "TMA describes no empty tensor"


@pytest.mark.parametrize("tile", CODES_TILES)
@pytest.mark.parametrize(("tokens", "power_of_two"), [(1, False), (7, True), (66, True)])
def test_the_kernel_stores_the_codes_of_its_product(tokens: int, tile: Tile, power_of_two: bool) -> None:
    o_THC, kv_b = of_whole_blocks(tokens)
    y_TN = head_gemm_triton(o_THC, kv_b, part=VALUES, tile=SOME).flatten(1)
    want = quantize_activation_triton(y_TN, power_of_two)
    for x_THC in (o_THC, o_THC.transpose(0, 1).contiguous().transpose(0, 1)):
        found = head_gemm_codes_triton(x_THC, kv_b, part=VALUES, power_of_two=power_of_two, tile=tile)
        assert found.scale.stride() == want.scale.stride() and bytes_of(found) == bytes_of(want)


def test_more_tokens_have_larger_tiles() -> None:
    assert [choose_codes_tile(tokens).rows for tokens in (1, 128, 129, 256, 257, 20_000)] == [16, 16, 32, 32, 64, 128]
