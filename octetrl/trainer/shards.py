"""Which rows of each parameter a worker owns.

    parameter [rows, ...]   is cut into blocks of 128 rows; the last block may be shorter
    a worker                owns one contiguous range of blocks, possibly empty; ranges follow in the order of ranks

The ranges of a parameter differ by one block at most. The workers that own the fewest elements so far get the larger
ranges, so that the shares of a whole model are balanced. Every worker computes the same table from the shapes.

A block begins where an FP8 scale's block begins (fp8/format.py). Its first element is a multiple of 128, where a block
of 8-bit moments begins (kernels/optimizer/adamw.py). A block therefore quantises and updates by itself, with the bits
of the whole parameter. Stacked experts whose rows are no multiple of 128 are cut between experts, where their scales
begin again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor

GradientMode = Literal["local", "sharded"]  # trainer/gradients.py
BLOCK_ROWS = 128
BUCKET_ELEMENTS = 1 << 26  # of one exchange: 256 MiB of float32


@dataclass(frozen=True, slots=True)
class Share:
    """The part that worker `rank` of `count` workers owns.

    Example: Share(rank=1, count=4)
    """

    rank: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.count, f"worker {self.rank} of {self.count}"


class Rows(NamedTuple):
    """Rows `start` to `stop` of a parameter, `stop` excluded; empty if they are equal."""

    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows, as a view: contiguous if the tensor is."""
        return tensor[self.start : self.stop]


def cut_rows(
    shapes: Sequence[Sequence[int]], count: int, units: Sequence[int] | None = None
) -> tuple[tuple[Rows, ...], ...]:
    """For each shape the rows of each of `count` workers; together they are all rows, in order. A shape has a row.

    `units`: rows of a block of each shape, if not 128.
    """
    assert all(shapes), "a parameter without dimensions has no rows to share; give it the shape [1]"
    elements = [0] * count
    table: list[tuple[Rows, ...]] = []
    for shape, unit in zip(shapes, units or [BLOCK_ROWS] * len(shapes), strict=True):
        rows = shape[0]
        each, remaining = divmod(-(-rows // unit), count)
        with_more = sorted(range(count), key=lambda rank: (elements[rank], rank))[:remaining]
        blocks = [each + (rank in with_more) for rank in range(count)]
        bounds = [min(block * unit, rows) for block in accumulate(blocks, initial=0)]
        table.append(tuple(Rows(*bound) for bound in pairwise(bounds)))
        for rank, (start, stop) in enumerate(table[-1]):
            elements[rank] += (stop - start) * prod(shape[1:])
    return tuple(table)


class Cut(NamedTuple):
    """A contiguous tensor [rows, ...] with the rows that each worker owns, or a part of them, by rank."""

    tensor: Tensor
    rows: tuple[Rows, ...]

    def part(self, rank: int) -> Tensor:
        """The rows of one worker, as a view."""
        return self.rows[rank].of(self.tensor)

    def num_bytes(self, rank: int) -> int:
        """The bytes of one worker's rows."""
        start, stop = self.rows[rank]
        return (stop - start) * (self.tensor.nbytes // len(self.tensor))

    @property
    def is_even(self) -> bool:
        """Whether the workers own equally many rows, and together the whole tensor."""
        each, rest = divmod(len(self.tensor), len(self.rows))
        return not rest and all(rows == (rank * each, rank * each + each) for rank, rows in enumerate(self.rows))


def lots(cuts: Sequence[Cut], num_bytes: int) -> Iterator[list[Cut]]:
    """The same cuts in lists of at most `num_bytes`, or of one cut."""
    lot: list[Cut] = []
    filled = 0
    for cut in cuts:
        if lot and filled + cut.tensor.nbytes > num_bytes:
            yield lot
            lot, filled = [], 0
        lot.append(cut)
        filled += cut.tensor.nbytes
    if lot:
        yield lot


def buckets(cuts: Sequence[Cut], elements: int = BUCKET_ELEMENTS) -> Iterator[list[Cut]]:
    """The same rows in lists of cuts, with at most `elements` elements each, or 128 rows of every worker.

    A large tensor is cut into several parts, each with some rows of every worker.
    """
    bucket: list[Cut] = []
    filled = 0
    for cut in cuts:
        width = cut.tensor[:1].numel()
        largest = max(stop - start for start, stop in cut.rows)
        step = max(elements // max(width * len(cut.rows), 1) // BLOCK_ROWS, 1) * BLOCK_ROWS
        for begin in range(0, largest, step):
            rows = tuple(Rows(min(start + begin, stop), min(start + begin + step, stop)) for start, stop in cut.rows)
            size = width * sum(stop - start for start, stop in rows)
            if bucket and filled + size > elements:
                yield bucket
                bucket, filled = [], 0
            bucket.append(Cut(cut.tensor, rows))
            filled += size
    if bucket:
        yield bucket
