"""The digest of weights shows changed bytes and changed places. It does not depend on the parts it is added in."""

from __future__ import annotations

import pytest
import torch

from octetrl.engine.weight_digest import digest_of, row_sums


def weight(dtype: torch.dtype = torch.bfloat16, columns: int = 32) -> torch.Tensor:
    return torch.randn(6, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("columns", [32, 33], ids=["words", "bytes"])
def test_swapped_values_of_a_row_or_of_a_column_show(columns: int) -> None:
    w = weight(columns=columns)
    digests = {digest_of(1, [w])}
    for (row, column), (row2, column2) in (((2, 3), (2, 17)), ((2, 3), (4, 3)), ((0, 4), (0, 8))):
        swapped = w.clone()
        swapped[row, column], swapped[row2, column2] = w[row2, column2], w[row, column]
        digests.add(digest_of(1, [swapped]))
    in_words = w.clone()
    in_words[1, :4], in_words[1, 4:8] = w[1, 4:8], w[1, :4]  # eight bytes each
    assert len(digests | {digest_of(1, [in_words]), digest_of(2, [w])}) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_signs_that_changed_in_pairs_show(dtype: torch.dtype) -> None:
    """The sign of the last value of a word is its top bit."""
    w = weight(torch.float32)
    columns = w.clone()
    columns[:, 7::8] *= -1
    two = w.clone()
    two[2, 7] *= -1
    two[5, 15] *= -1
    assert len({digest_of(1, [one.to(dtype)]) for one in (w, columns, two)}) == 3


def test_parts_are_no_part_of_it() -> None:
    w = weight()
    assert torch.equal(torch.cat([row_sums(w[:2]), row_sums(w[2:])]), row_sums(w)), "of rows on several workers"


def test_a_tensor_without_rows() -> None:
    assert row_sums(torch.zeros(0, 8)).shape == (0,) and digest_of(1, []) == digest_of(1, [])
