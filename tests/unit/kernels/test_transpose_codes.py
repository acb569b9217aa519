"""Transposed codes, of one weight and of many, have the bytes of a transposed view, whatever the shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.quantize.transpose_codes import transpose_codes, transpose_codes_triton
from octetrl.kernels.quantize.transpose_many_codes import (
    fits_table,
    transpose_many_codes,
    transpose_many_codes_reference,
    transpose_many_codes_triton,
)

FITTING = [(128, 128), (256, 384), (16, 16), (1280, 144), (400, 16)]
RAGGED = [(132, 200), (4, 1), (1280, 130), (384, 7)]


def pair_of(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    return codes.view(E4M3), torch.zeros(columns, rows, dtype=E4M3)


def assert_transposed(*pairs: tuple[Tensor, Tensor]) -> None:
    for codes, out in pairs:
        assert torch.equal(out.view(torch.uint8), codes.view(torch.uint8).t()), codes.shape


@pytest.mark.parametrize("shape", [*FITTING[:2], *RAGGED])
def test_every_byte_is_at_its_place(shape: tuple[int, int]) -> None:
    codes, out = pair_of(*shape)
    assert transpose_codes_triton(codes, out) is out
    for given in (None, torch.zeros_like(out)):
        found = transpose_codes(codes, given)
        assert_transposed((codes, out), (codes, found))
        assert given is None or found is given


def test_an_odd_number_of_rows_and_a_view_are_transposed_too() -> None:
    codes = torch.arange(35, dtype=torch.uint8).view(5, 7)
    assert torch.equal(transpose_codes(codes), codes.t().contiguous())
    assert torch.equal(transpose_codes(codes.t()), codes)
    with pytest.raises(AssertionError, match="contiguous"):
        transpose_codes(codes, torch.empty(5, 7, dtype=torch.uint8).t())


@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (transpose_many_codes_triton, FITTING),
        (transpose_many_codes, [*FITTING, (5, 7), *RAGGED]),
        (transpose_many_codes_reference, [*FITTING, (5, 7), *RAGGED]),
    ],
)
def test_many_are_transposed(run: Callable[[list[tuple[Tensor, Tensor]]], None], shapes: list[tuple[int, int]]) -> None:
    pairs = [pair_of(*shape) for shape in shapes]
    run(pairs)
    assert_transposed(*pairs)


def test_what_the_table_of_many_takes() -> None:
    assert all(fits_table(*pair_of(*shape)) for shape in FITTING)
    for shape in ((132, 128), (128, 200), (0, 16)):
        assert not fits_table(*pair_of(*shape)), shape
    codes, out = pair_of(32, 32)
    shifted = torch.zeros(32 * 32 + 1, dtype=torch.uint8)[1:].view(32, 32)
    assert fits_table(codes, out) and not fits_table(shifted, out) and not fits_table(codes, shifted)
    assert not fits_table(codes.t(), out)
    with pytest.raises(AssertionError, match="contiguous"):
        transpose_many_codes([(codes, out.t())])
