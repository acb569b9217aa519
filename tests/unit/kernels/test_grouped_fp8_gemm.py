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
