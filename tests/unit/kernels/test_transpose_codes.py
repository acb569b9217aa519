"""Transposed codes have the bytes of a transposed view, whatever the shape."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.kernels.quantize.transpose_codes import (
    transpose_codes as transpose,
)
from octetrl.kernels.quantize.transpose_codes import (
    transpose_codes_triton,
)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (256, 384), (132, 200), (4, 1), (1280, 130), (384, 7)])
def test_every_byte_is_at_its_place(rows: int, columns: int) -> None:
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    wanted = codes.t().contiguous()
    out = torch.zeros(columns, rows, dtype=E4M3)
    assert transpose_codes_triton(codes.view(E4M3), out) is out
    assert torch.equal(out.view(torch.uint8), wanted)
    for given in (None, torch.zeros(columns, rows, dtype=torch.uint8)):
        found = transpose(codes, given)
        assert torch.equal(found, wanted) and (given is None or found is given)


def test_an_odd_number_of_rows_and_a_view_are_transposed_too() -> None:
    codes = torch.arange(35, dtype=torch.uint8).view(5, 7)
    assert torch.equal(transpose(codes), codes.t().contiguous())
    assert torch.equal(transpose(codes.t()), codes)
    with pytest.raises(AssertionError, match="contiguous"):
        transpose(codes, torch.empty(5, 7, dtype=torch.uint8).t())
