"""The grouped FP8 GEMM: its reference against single GEMMs, the kernel (interpreted) against the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from octetrl.fp8.backends import fp8_gemm_dgrad, fp8_gemm_nt, transposed
from octetrl.fp8.quantize import Quantized, quantize_activation_reference, quantize_weight_reference
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm.grouped_fp8_gemm import (
    FEW,
    FP8_MANY,
    MANY,
    SOME,
    Tile,
    grouped_fp8_gemm,
    grouped_fp8_gemm_triton,
)
from octetrl.kernels.rows import sort_by_expert
from octetrl.kernels.rows.sort_by_expert import owners_of_tiles, rows_of_tiles
from tests.unit.kernels.grouped_cases import LOADS, first_rows

N, K = 256, 384


def operands(load: tuple[int, ...], depth: int) -> tuple[Quantized, Quantized]:
    """Scales differ from block to block; the activation's has strides (1, P)."""
    generator = torch.Generator().manual_seed(len(load))
    x_PK = torch.randn(sum(load), depth, generator=generator) * torch.logspace(-1, 1, depth)
    w_NK = torch.randn(len(load) * N, K, generator=generator) * torch.logspace(-1, 1, len(load) * N)[:, None]
    x = quantize_activation_reference(x_PK.bfloat16())
    return Quantized(x.codes, x.scale.t().contiguous().t()), quantize_weight_reference(w_NK.bfloat16())


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_each_row_is_multiplied_by_its_experts_matrix(load: tuple[int, ...]) -> None:
    x, w = operands(load, K)
    first_X1 = first_rows(load)
    y_PN = grouped_fp8_gemm(x, w, first_X1)
    dy, _ = operands(load, N)
    dx_PK = grouped_fp8_gemm(dy, transposed(w), first_X1, turned=True)
    for expert, (start, stop) in enumerate(pairwise(first_X1.tolist())):
        own = Quantized(w.codes[expert * N : (expert + 1) * N], w.scale[expert * 2 : expert * 2 + 2])
        of_rows = Quantized(x.codes[start:stop], x.scale[start:stop])
        assert torch.equal(y_PN[start:stop], fp8_gemm_nt(of_rows, own))
        of_gradient = Quantized(dy.codes[start:stop], dy.scale[start:stop])
        want = fp8_gemm_dgrad(of_gradient, transposed(own), out_dtype=torch.float32)
        assert stop == start or relative_error(dx_PK[start:stop], want) < 5e-3


@pytest.mark.parametrize("tile", [FEW, SOME, MANY, FP8_MANY, Tile(16, 128, 2, swap=True)])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_the_kernel_is_near_the_reference(load: tuple[int, ...], tile: Tile) -> None:
    x, w = operands(load, K)
    y_PN = grouped_fp8_gemm_triton(x, w, first_rows(load), tile)
    assert y_PN.shape == (sum(load), N)
    want_PN = grouped_fp8_gemm(x, w, first_rows(load)).float()
    assert not sum(load) or ((y_PN.float() - want_PN).norm(dim=1) <= 8e-3 * want_PN.norm(dim=1)).all()


@pytest.mark.parametrize(
    ("rows", "load"),
    [(16, (5, 0, 1, 17, 30)), (32, LOADS["ragged"]), (64, (30, 66)), (128, (129, 0, 60, 127, 1)), (128, (0, 190))],
)
def test_tiles_with_owners_compute_the_same_rows(
    rows: int, load: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort_by_expert, "MANY_FROM", 60)
    x, w = operands(load, K)
    assert rows_of_tiles(sum(load), len(load)) == rows
    owner_O3 = owners_of_tiles(first_rows(load), sum(load))
    want_PN = grouped_fp8_gemm_triton(x, w, first_rows(load))
    assert torch.equal(grouped_fp8_gemm_triton(x, w, first_rows(load), owner_O3=owner_O3), want_PN)


def test_the_kernel_multiplies_by_turned_codes() -> None:
    load = LOADS["ragged"]
    dy, w = operands(load, N)[0], operands(load, K)[1]
    turned = Quantized(w.codes.t().contiguous(), w.scale.t())
    dx_PK = grouped_fp8_gemm_triton(dy, turned, first_rows(load), SOME, turned=True)
    want_PK = grouped_fp8_gemm(dy, turned, first_rows(load), turned=True).float()
    assert ((dx_PK.float() - want_PK).norm(dim=1) <= 8e-3 * want_PK.norm(dim=1)).all()


# ---------------------------------------------------------------- ragged last blocks

RAGGED_N, RAGGED_K = 208, 336
BIAS_STD = 3.0


def ragged(load: tuple[int, ...], depth: int) -> tuple[Quantized, Quantized]:
    """Each expert's blocks begin at its first row."""
    generator = torch.Generator().manual_seed(len(load))
    x_PK = torch.randn(sum(load), depth, generator=generator) * torch.logspace(-1, 1, depth)
    w_XNK = torch.randn(len(load), RAGGED_N, RAGGED_K, generator=generator) * torch.logspace(-1, 1, RAGGED_K)
    parts = [quantize_weight_reference(w_NK.bfloat16()) for w_NK in w_XNK]
    w = Quantized(torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]))
    x = quantize_activation_reference(x_PK.bfloat16())
    return Quantized(x.codes, x.scale.t().contiguous().t()), w


@pytest.mark.parametrize(("tile", "with_bias"), [(FEW, True), (SOME, False), (MANY, True)])
def test_last_blocks_may_be_ragged_and_experts_may_have_biases(tile: Tile, with_bias: bool) -> None:
    load = LOADS["ragged"]
    first_X1 = first_rows(load)
    generator = torch.Generator().manual_seed(3)
    bias_N = (torch.randn(len(load) * RAGGED_N, generator=generator) * BIAS_STD).bfloat16() if with_bias else None
    x, w = ragged(load, RAGGED_K)
    want_PN = grouped_fp8_gemm(x, w, first_X1, bias=bias_N).float()
    got_PN = grouped_fp8_gemm_triton(x, w, first_X1, tile, bias=bias_N)
    assert ((got_PN.float() - want_PN).norm(dim=1) <= 8e-3 * want_PN.norm(dim=1)).all()
    for expert, (start, stop) in enumerate(pairwise(first_X1.tolist())):
        rows = slice(expert * RAGGED_N, (expert + 1) * RAGGED_N)
        own = Quantized(w.codes[rows], w.scale[2 * expert : 2 * expert + 2])
        y_Pn = fp8_gemm_nt(Quantized(x.codes[start:stop], x.scale[start:stop]), own, out_dtype=torch.float32)
        assert torch.equal(want_PN[start:stop], (y_Pn if bias_N is None else y_Pn + bias_N[rows]).bfloat16().float())


def test_ragged_codes_may_be_turned() -> None:
    """The depth's last block reaches into the next expert's codes, which are multiplied by zeros."""
    load = LOADS["ragged"]
    dy, w = ragged(load, RAGGED_N)[0], ragged(load, RAGGED_K)[1]
    turned = Quantized(w.codes.t().contiguous(), w.scale.t())
    for tile in (FEW, SOME):
        dx_PK = grouped_fp8_gemm_triton(dy, turned, first_rows(load), tile, turned=True)
        want_PK = grouped_fp8_gemm(dy, turned, first_rows(load), turned=True).float()
        assert dx_PK.shape == (sum(load), RAGGED_K)
        assert ((dx_PK.float() - want_PK).norm(dim=1) <= 8e-3 * want_PK.norm(dim=1)).all()
