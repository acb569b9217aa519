"""Tables of tensors for a kernel that processes many of them in one launch.

A model has hundreds of weights, and a launch from Python costs tens of microseconds. Such a kernel gets a table with an
entry for each tensor: addresses, sizes, and the number of its programs. A program reads which entry is its own, then
that entry. `first` is the entry's first program, so a program knows its place in the tensor.

A table is kept while its entries stay the same (`table_of`). Addresses are part of the entries, so a tensor that was
freed and allocated elsewhere gives another table. The caller must keep the tensors alive until the kernel is launched.

Sizes may be stored divided by 16. A kernel that multiplies them by 16 again tells the compiler that they are multiples,
which it needs for loads and stores of 16 bytes.

E entries, C columns, P programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 16  # bytes of the widest load
Entry = tuple[int, ...]


class Table(NamedTuple):
    """A table on a device. The last two columns are `first` and the number of the entry's programs."""

    entry_P: Tensor  # int32: the entry of each program
    rows_EC: Tensor  # int64

    @property
    def programs(self) -> int:
        return len(self.entry_P)

    @property
    def columns(self) -> int:
        return self.rows_EC.shape[1]


def table_of(entries: Sequence[Entry], programs: Sequence[int], device: torch.device) -> Table:
    """The table of these entries, `programs[e]` programs for entry e. Waits for nothing: a table is made on the current
    stream, and another stream makes its own."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _kept(tuple(entries), tuple(programs), device, stream)


def parts_of(size: int, part: int) -> int:
    """`size / part`, rounded up. `triton.cdiv` takes a microsecond, and some tables need a thousand."""
    return -(-size // part)


def all_aligned(*tensors: Tensor) -> bool:
    """Whether each begins at a multiple of 16 bytes."""
    return not any(tensor.data_ptr() % ALIGNED for tensor in tensors)


@lru_cache(maxsize=8)
def _kept(entries: tuple[Entry, ...], programs: tuple[int, ...], device: torch.device, stream: int) -> Table:
    firsts = accumulate(programs[:-1], initial=0)
    rows = [(*entry, first, count) for entry, first, count in zip(entries, firsts, programs, strict=True)]
    rows_EC = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        rows_EC = rows_EC.pin_memory().to(device, non_blocking=True)
    numbers_E = torch.arange(len(rows), dtype=torch.int32, device=device)
    return Table(numbers_E.repeat_interleave(rows_EC[:, -1], output_size=sum(programs)), rows_EC)
