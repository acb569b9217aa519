"""SiLU·mul and its codes in one kernel, against the two references one after the other."""

from __future__ import annotations

import pytest
import torch

import octetrl.kernels.rows.silu_mul_quantize as module
from octetrl.fp8.quantize import quantize_activation_reference
from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize, silu_mul_quantize_triton
from tests.unit.kernels.fused_row_cases import assert_near, bytes_of, normal


def test_is_the_product_then_its_codes() -> None:
    gate_up = normal(9, 2 * 208)
    got, want = silu_mul_quantize(gate_up), quantize_activation_reference(silu_mul(gate_up))
    assert torch.equal(got.codes.float(), want.codes.float()) and torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(3, 1024), (2, 2048), (1, 4096), (2, 1232), (5, 80), (0, 128)])
def test_kernel_is_near_the_reference(shape: tuple[int, int], power_of_two: bool) -> None:
    gate_up = normal(shape[0], 2 * shape[1], dtype=torch.float32) * 2
    gate_up[:, :16] = 0
    got = silu_mul_quantize_triton(gate_up, power_of_two)
    assert got.scale.stride() == (1, max(1, -(-shape[0] // 4) * 4))
    assert_near(got, silu_mul_quantize(gate_up, power_of_two))


def test_blocks_of_zeros_and_of_nan() -> None:
    gate_up = normal(2, 2 * 384)
    gate_up[:, :128] = 0
    gate_up[1, 384 + 300] = torch.nan
    codes, scale = silu_mul_quantize_triton(gate_up)
    assert codes[:, :128].float().count_nonzero() == 0 and scale[:, 0].tolist() == [1.0, 1.0]
    assert codes[1, 256:].float().isnan().all() and scale[:, 2].isnan().tolist() == [False, True]
    assert codes[:, 128:256].float().isfinite().all()


@pytest.mark.parametrize("shape", [(7, 1408), (4, 1408), (1, 768), (37, 384), (5, 200), (300, 128)])
def test_a_tile_may_hold_blocks_of_several_tokens(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the bytes of one block a tile. NaN and infinity stay in their blocks."""
    gate_up = normal(shape[0], 2 * shape[1])
    gate_up[-1, 5], gate_up[0, shape[1] - 1] = torch.nan, torch.inf
    found = silu_mul_quantize_triton(gate_up)
    bad = found.scale.isnan()
    assert bad.sum() == len({(shape[0] - 1, 0), (0, bad.shape[1] - 1)}) and bad[-1, 0] and bad[0, -1]
    monkeypatch.setattr(module, "TILES", {128: 4})
    assert bytes_of(silu_mul_quantize_triton(gate_up)) == bytes_of(found)
