"""The digest of weights shows changed bytes and changed places. It does not depend on the parts it is added in."""

from __future__ import annotations

import pytest
import torch

from octetrl.engine.weights import digest_of
from octetrl.kernels.rows.sum_words import sum_words


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_signs_that_changed_in_one_row_show(dtype: torch.dtype) -> None:
    """Any number of words whose top bit changed. A sum to which each adds plus or minus the same number would hide half
    of the pairs."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 256, generator=generator).to(dtype)
    octets = w.view(torch.uint8).view(2, -1, 8)
    unchanged = digest_of(1, [w])
    for trial in range(200):
        changed = octets.clone()
        words = torch.randperm(octets.shape[1], generator=generator)[: 2 if trial % 2 else 8]
        changed[0, words, 7] ^= 0x80 >> (trial // 2 % 3)
        assert digest_of(1, [changed.view(2, -1).view(dtype)]) != unchanged, words


def test_parts_are_no_part_of_it() -> None:
    """Several workers may have some rows each."""
    w = weight()
    assert digest_of(1, [w[:2], w[2:]]) == digest_of(1, [w])


def test_tensors_of_many_shapes_in_one_sum() -> None:
    """Each tensor's rows have the sums that they have alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5), (8,), (3, 5), (7,), (2, 3, 4), (2, 3, 4), (0, 5), (8,), (600, 900), (3, 5))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors = [*drawn, *(one.bfloat16() for one in drawn), *(one.to(torch.float8_e4m3fn) for one in drawn)]
    tensors.append(torch.randn(5, 3, generator=generator).t())
    assert torch.equal(sum_words(tensors), torch.cat([sum_words([one]) for one in tensors]))
    assert digest_of(1, tensors) != digest_of(1, [tensors[2], tensors[1], tensors[0], *tensors[3:]])


def test_a_digest_is_what_it_was() -> None:
    """Workers and backends compare digests: the definition must not drift."""
    w = torch.arange(96, dtype=torch.uint8).view(6, 16)
    assert digest_of(3, [w, w[0, :5].clone(), w[:3, :7].clone()]) == "5139dec75e800878"


def test_a_tensor_without_rows() -> None:
    assert sum_words([torch.zeros(0, 8)]).shape == (0,)
    assert digest_of(1, []) == digest_of(1, [torch.zeros(0, 8)])
