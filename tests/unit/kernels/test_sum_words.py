"""Sums of words times odd numbers of their places: the kernel has the integers of plain torch, and that of Python's."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows import sum_words
from octetrl.kernels.rows.sum_words import BYTES, PAIRS, STRIDE, WORDS, sum_words_reference, sum_words_triton
from octetrl.kernels.rows.sum_words import sum_words as run
from octetrl.kernels.table import ALIGNED, Table, table_of

ANY = 1 << 62


def draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-ANY, ANY, (rows, columns), generator=torch.Generator().manual_seed(rows))


def draw_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def by_python(row: list[int]) -> int:
    total = 0
    for place, word in enumerate(row):
        first = signed((place + 1) * STRIDE | 1)
        second = folded(first) * STRIDE | 1
        total += folded(signed(word * first)) * second
    return signed(total)


def folded(number: int) -> int:
    """With its upper half in the lower one, too."""
    return number ^ (number % 2**64 >> 32)


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def test_the_sums_are_those_of_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_words, "PART", 64)
    drawn = [draw(5, 40), draw_bytes(2, 13), draw(0, 3), draw(4, 1)]
    assert run(drawn).tolist() == [by_python(row) for words in drawn for row in words.tolist()]
    assert run([]).tolist() == []


def test_a_row_is_all_but_the_first_dimension_and_any_dtype_is_bytes() -> None:
    words = draw(6, 4)
    wanted = run([words])
    assert torch.equal(run([words.view(6, 2, 2)]), wanted)
    assert torch.equal(run([words.view(torch.bfloat16)]), wanted)
    assert torch.equal(run([words.view(torch.float8_e4m3fn).t().contiguous().t()]), wanted), "not contiguous"
    assert torch.equal(run([words.flatten()]), run([words.view(1, 24)]))
    assert torch.equal(run([draw(3, 0)]), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(run([torch.zeros(3, 0)]), torch.zeros(3, dtype=torch.int64)), "floats without columns"
    assert torch.equal(run([torch.tensor(2.0, dtype=torch.float64)]), run([torch.tensor([2.0], dtype=torch.float64)]))


SHAPES = [(1, 1), (4, 512), (5, 700), (3, 1500), (9, 64), (0, 8), (2, 0)]


@pytest.mark.parametrize("shapes", [[shape] for shape in SHAPES] + [SHAPES], ids=str)
def test_the_kernel_has_the_integers_of_torch(shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_words, "SPAN", 1024)  # so that two programs share a long row
    tensors = [draw(*shape) for shape in shapes]
    if len(shapes) > 1:  # an odd number of words, of bytes, a row, and words that begin between two pairs
        tensors += [draw(3, 7), draw_bytes(5, 601), draw_bytes(9), draw(1, 65)[0, 1:].view(4, 16)]
    sums = torch.zeros(2, sum(len(one) if one.dim() > 1 else 1 for one in tensors), dtype=torch.int64)
    assert torch.equal(sum_words_triton(tensors, sums[0]), sum_words_reference(tensors, sums[1]))


def test_pairs_of_words_are_loaded_only_where_every_row_begins_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a GPU cannot load 16 bytes at once. The interpreter can."""
    kinds: list[int] = []

    def kept(entries: list[tuple[int, ...]], programs: list[int], device: torch.device) -> Table:
        kinds.extend(kind for _, kind, *_ in entries)
        return table_of(entries, programs, device)

    monkeypatch.setattr(sum_words, "table_of", kept)
    words = draw(1, 65)[0]
    assert words.data_ptr() % ALIGNED == 0
    between = words[1:].view(4, 16)
    tensors = [words[:64].view(4, 16), between, words[:63].view(9, 7), words.view(torch.uint8)[1:504].view(1, 503)]
    sum_words_triton(tensors, torch.zeros(4 + 4 + 9 + 1, dtype=torch.int64))
    assert kinds == [PAIRS, WORDS, WORDS, BYTES]


def test_a_tensor_that_moved_or_changed_has_another_sum() -> None:
    """A table is kept while the addresses stay the same, and the bytes behind them are read each time."""

    def sums(*tensors: torch.Tensor) -> list[int]:
        return sum_words_triton(tensors, torch.zeros(2, dtype=torch.int64)).tolist()

    one, two = draw(1, 16), draw(1, 16) ^ 1
    first = sums(one, two)
    assert sums(one, two) == first and sums(two, one) == first[::-1]
    two[0, 3] ^= 1
    assert sums(one, two)[1] != first[1]
    one.untyped_storage().resize_(0)
    one.untyped_storage().resize_(128)
    one.copy_(two)
    assert len(set(sums(one, two))) == 1
