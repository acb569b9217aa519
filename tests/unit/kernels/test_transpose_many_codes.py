"""Transposed codes of many weights have the bytes of each weight's transposed view."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.kernels.quantize.transpose_many_codes import (
    fits_table,
    transpose_many_codes_reference,
    transpose_many_codes_triton,
)
from octetrl.kernels.quantize.transpose_many_codes import transpose_many_codes as transpose

SHAPES = [(128, 128), (256, 384), (16, 16), (1280, 144), (400, 16)]


def pair_of(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    return codes.view(E4M3), torch.zeros(columns, rows, dtype=E4M3)


def assert_transposed(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for codes, out in pairs:
        assert torch.equal(out.view(torch.uint8), codes.view(torch.uint8).t()), codes.shape


def test_every_byte_is_at_its_place() -> None:
    pairs = [pair_of(*shape) for shape in SHAPES]
    assert all(fits_table(*pair) for pair in pairs)
    transpose_many_codes_triton(pairs)
    assert_transposed(pairs)


@pytest.mark.parametrize("run", [transpose, transpose_many_codes_reference])
def test_any_shape_is_transposed(run: object) -> None:
    pairs = [pair_of(*shape) for shape in [*SHAPES, (5, 7), (132, 200), (384, 7)]]
    assert callable(run)
    run(pairs)
    assert_transposed(pairs)


def test_what_the_table_does_not_take() -> None:
    for shape in ((132, 128), (128, 200), (0, 16)):
        assert not fits_table(*pair_of(*shape)), shape
    codes, out = pair_of(32, 32)
    shifted = torch.zeros(32 * 32 + 1, dtype=torch.uint8)[1:].view(32, 32)
    assert fits_table(codes, out) and not fits_table(shifted, out) and not fits_table(codes, shifted)
    assert not fits_table(codes.t(), out)
    with pytest.raises(AssertionError, match="contiguous"):
        transpose([(codes, out.t())])
