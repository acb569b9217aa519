"""The grouped BF16 GEMMs: references against written-out products, kernels (interpreted) against the references."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from octetrl.kernels.gemm.grouped_bf16_gemm import (
    BF16_MANY,
    NARROW_WGRAD,
    WIDE_WGRAD,
    Part,
    grouped_bf16_gemm,
    grouped_bf16_gemm_triton,
    grouped_wgrad,
    grouped_wgrad_triton,
)
from octetrl.kernels.gemm.grouped_fp8_gemm import FEW, MANY, SOME, Tile
from tests.unit.kernels.grouped_cases import LOADS, first_rows

N, K = 200, 192


def operands(load: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(load))
    x_PK = torch.randn(sum(load), K, generator=generator).bfloat16()
    dy_PN = torch.randn(sum(load), N, generator=generator).bfloat16()
    return x_PK, dy_PN, torch.randn(len(load) * N, K, generator=generator).bfloat16()


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_each_row_is_multiplied_by_its_experts_matrix(load: tuple[int, ...]) -> None:
    x_PK, dy_PN, w_NK = operands(load)
    expert_P = torch.repeat_interleave(torch.arange(len(load)), torch.tensor(load))
    w_PNK = w_NK.view(len(load), N, K)[expert_P].double()
    first_X1 = first_rows(load)
    y_PN = torch.einsum("pk,pnk->pn", x_PK.double(), w_PNK)
    dx_PK = torch.einsum("pn,pnk->pk", dy_PN.double(), w_PNK)
    torch.testing.assert_close(grouped_bf16_gemm(x_PK, w_NK, first_X1), y_PN.float().bfloat16())
    torch.testing.assert_close(grouped_bf16_gemm(dy_PN, w_NK, first_X1, turned=True), dx_PK.float().bfloat16())
    one_hot_PX = torch.nn.functional.one_hot(expert_P, len(load)).double()
    dw_XNK = torch.einsum("px,pn,pk->xnk", one_hot_PX, dy_PN.double(), x_PK.double())
    found = grouped_wgrad(dy_PN, x_PK, first_X1, torch.float32)
    torch.testing.assert_close(found, dw_XNK.flatten(0, 1).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tile", [FEW, SOME, MANY, BF16_MANY])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_the_kernels_are_near_the_references(load: tuple[int, ...], tile: Tile) -> None:
    x_PK, dy_PN, w_NK = operands(load)
    first_X1 = first_rows(load)
    near(grouped_bf16_gemm_triton(x_PK, w_NK, first_X1, tile), grouped_bf16_gemm(x_PK, w_NK, first_X1))
    dy_PK, w_KN = x_PK, w_NK.view(len(load), N, K).transpose(1, 2).reshape(-1, N).contiguous()
    dx_PN = grouped_bf16_gemm_triton(dy_PK, w_KN, first_X1, tile, turned=True)
    near(dx_PN, grouped_bf16_gemm(dy_PK, w_KN, first_X1, turned=True))
    if tile == FEW:
        for columns in (N, N - 3):  # of 197 columns TMA reads nothing
            dy_PC = dy_PN[:, :columns].contiguous()
            for wide in (NARROW_WGRAD, WIDE_WGRAD):
                dw_CK = grouped_wgrad_triton(dy_PC, x_PK, first_X1, torch.float32, wide)
                want_CK = grouped_wgrad(dy_PC, x_PK, first_X1, torch.float32)
                torch.testing.assert_close(dw_CK, want_CK, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tile", [FEW, MANY])
def test_a_part_of_each_matrix_is_read_where_it_lies(tile: Tile) -> None:
    """As `kv_b`'s two parts are: 64 rows and 40 of each expert, both ways, with the bits of a copy of these rows."""
    load = (3, 0, 70, 1)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(len(load) * 104, 128, generator=generator).bfloat16()
    first_X1 = first_rows(load)
    for part in (Part(0, 64), Part(64), Part(0, 40)):
        rows = part.of(104)
        copy = w.view(len(load), 104, 128)[:, rows.start : rows.stop].reshape(-1, 128).contiguous()
        for turned in (False, True) if len(rows) == 64 else (False,):
            depth = len(rows) if turned else 128
            x_PK = torch.randn(sum(load), depth, generator=generator).bfloat16()
            for multiply in (grouped_bf16_gemm, partial(grouped_bf16_gemm_triton, tile=tile)):
                found = multiply(x_PK, w, first_X1, turned=turned, part=part)
                assert torch.equal(found, multiply(x_PK, copy, first_X1, turned=turned))


def near(found: Tensor, want: Tensor) -> None:
    """The interpreter truncates to BF16."""
    assert found.shape == want.shape
    assert ((found - want).float().norm(dim=1) <= 8e-3 * want.float().norm(dim=1)).all()
