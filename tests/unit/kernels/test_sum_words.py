"""Sums of words times odd numbers of their places: the kernel has the integers of plain torch, and that of Python's."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows import sum_words
from octetrl.kernels.rows.sum_words import STRIDE, sum_words_reference, sum_words_triton
from octetrl.kernels.rows.sum_words import sum_words as run
from tests.unit.kernels.interpreting import interpret

ANY = 1 << 62


def draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-ANY, ANY, (rows, columns), generator=torch.Generator().manual_seed(rows))


def by_python(row: list[int]) -> int:
    products = [signed(word * ((place + 1) * STRIDE | 1)) for place, word in enumerate(row)]
    return signed(sum(product ^ (product % 2**64 >> 32) for product in products))


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def test_the_sums_are_those_of_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_words, "PART", 64)
    octets = torch.randint(0, 256, (2, 13), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for words in (draw(5, 40), octets, draw(0, 3)):
        assert run(words).tolist() == [by_python(row) for row in words.tolist()]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 512), (5, 700), (3, 1500), (9, 64)])
def test_the_kernel_has_the_integers_of_torch(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, sum_words)
    monkeypatch.setattr(sum_words, "SPAN", 1024)  # so that two programs share a long row
    words, sums = draw(rows, columns), torch.zeros(2, rows, dtype=torch.int64)
    assert torch.equal(sum_words_triton(words, sums[0]), sum_words_reference(words, sums[1]))
