"""The kernel for few rows without a GPU: what its launchers refuse, and how much shared memory a variant takes."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.few_rows_gluon import SHARED_LIMIT, FewRows, few_rows_bf16, few_rows_fp8

FITS = FewRows(32, 8, 4, 4, swap=True)


def zeros_bf16(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16)


def zeros_fp8(m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    x, w = (zeros.to(torch.float8_e4m3fn) for zeros in zeros_bf16(m, n, k))
    blocks = -(-k // 128)
    return Quantized(x, torch.zeros(blocks, m).t()), Quantized(w, torch.zeros(-(-n // 128), blocks))


@pytest.mark.parametrize(
    ("rows", "depth", "config", "says"),
    [
        (8, 160, FITS, "K = 160, must be a multiple of"),
        (9, 256, FITS, "9 rows do not fit"),
        (8, 256, FewRows(128, 8, 2, 2, swap=True), "more than 64 rows on the MMA's long side"),
        (8, 256, FewRows(64, 128, 2, 1), "more than 64 rows on the MMA's long side"),
        (8, 256, FewRows(64, 8, 8, 8, swap=True), "does not fit in shared memory"),
    ],
)
def test_a_variant_that_cannot_take_the_operands_is_refused(rows: int, depth: int, config: FewRows, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        few_rows_bf16(*zeros_bf16(rows, 128, depth), config)
    with pytest.raises(ValueError, match=says):
        few_rows_fp8(*zeros_fp8(rows, 128, depth), rows, config)


def test_a_tile_has_one_scale_of_the_weight() -> None:
    with pytest.raises(ValueError, match="two scales of w in one tile"):
        few_rows_fp8(*zeros_fp8(8, 128, 256), 8, FewRows(48, 8, 2, 2, swap=True))


def test_operands_of_bf16_have_one_depth_and_are_contiguous() -> None:
    x_MK, w_NK = zeros_bf16(8, 128, 256)
    with pytest.raises(AssertionError, match=r"\(8, 256\) by \(128, 128\)"):
        few_rows_bf16(x_MK, w_NK[:, :128].contiguous(), FITS)
    with pytest.raises(AssertionError, match="contiguous"):
        few_rows_bf16(x_MK, w_NK.t().contiguous().t(), FITS)


def test_no_rows_need_no_launch() -> None:
    assert few_rows_bf16(*zeros_bf16(0, 128, 256), FITS).shape == (0, 128)
    assert few_rows_fp8(*zeros_fp8(0, 128, 256), 0, FITS).shape == (0, 128)


@pytest.mark.parametrize(
    ("config", "fp8", "panels", "scales"),
    [
        (FewRows(32, 8, 4, 4, swap=True), False, 16 * 40 + 32, 0),  # 32 spare rows of w behind the last panel
        (FewRows(64, 8, 5, 4, swap=True), False, 20 * 72, 0),  # none are spare
        (FewRows(32, 16, 4, 4), False, 16 * 48 + 48, 0),  # the spare rows are of x
        (FewRows(32, 8, 4, 4, swap=True), True, 16 * 40 + 32, 32 * 8),
        (FewRows(32, 16, 4, 4), True, 16 * 48 + 48, 32 * 64),  # x lies on the side of 64 rows, and so do its scales
    ],
)
def test_shared_memory(config: FewRows, fp8: bool, panels: int, scales: int) -> None:
    """Panels of 128 bytes a row; scales of 32 blocks of K at a time; a barrier a stage; 1 KB to align the ring."""
    assert config.shared_bytes(4096, fp8) == 128 * panels + 4 * scales + 8 * config.stages + 1024
    assert config.shared_bytes(4224, fp8) == 128 * panels + 8 * scales + 8 * config.stages + 1024


def test_the_limit_is_hoppers() -> None:
    assert SHARED_LIMIT == 232_448
