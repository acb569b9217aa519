"""Workers that share a micro-batch (context parallelism): what they exchange inside a forward and a backward.

Each worker has some of the tokens, whole blocks of 128, in which scales along tokens begin (fp8/quantize.py). All that
works row by row stays as it is. In attention a worker has all tokens of some heads instead:

    to_heads     own tokens of all heads -> all tokens of own heads
    to_tokens    the way back
    join         own rows -> those of all workers

Values move as bytes, so an output has the bits of one worker. If there are more workers than KV heads, several have the
same one. Their parts of its gradient are added in float32, in the order of ranks.

C workers of the group, T tokens of all, t of this one; H heads of all, h of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """Connected workers, as one of them sees them. All call the methods in one order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def swap(self, sent_B: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """The bytes for this worker, uint8, in the order of ranks. `sent`: the number of those for each worker, in
        order; `received`: of those from each."""

    def agree(self, error: str | None, phase: str) -> str | None:
        """The first error in the order of ranks; None if no worker has one."""


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """`rows`: bounds of the workers' tokens."""

    workers: Exchange
    rows: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of all workers."""
        return self.rows[-1]

    @property
    def own_rows(self) -> slice:
        return slice(*self.rows[self.workers.rank :][:2])

    def heads(self, count: int, rank: int | None = None) -> slice:
        """The heads, of `count`, of this worker or of another one."""
        size, rank = self.workers.size, self.workers.rank if rank is None else rank
        first = rank * count // size
        return slice(first, first + max(1, count // size))

    def to_heads(self, x_tH: Tensor) -> Tensor:
        """[T, h, ...] of [t, H, ...]."""
        parts = [x_tH[:, self.heads(x_tH.shape[1], rank)] for rank in range(self.workers.size)]
        shape = parts[self.workers.rank].shape[1:]
        return self._swap(parts, [count * shape.numel() for count in self._counts]).view(-1, *shape)

    def to_tokens(self, x_Th: Tensor, heads: int) -> Tensor:
        """[t, H, ...] of [T, h, ...], `heads` the number of all. Of heads that several workers have it is their sum, in
        float32."""
        own, size, shape = self._counts[self.workers.rank], self.workers.size, x_Th.shape[1:]
        parts = self._swap(x_Th.split(self._counts), [own * shape.numel()] * size).view(size, own, *shape).unbind()
        if heads >= size:
            return torch.cat(parts, 1)
        each = size // heads
        return torch.cat([reduce(torch.add, parts[first : first + each]) for first in range(0, size, each)], 1)

    def join(self, x_n: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows [N, ...] of all workers, of which each has `counts`."""
        shape = x_n.shape[1:]
        return self._swap([x_n] * self.workers.size, [count * shape.numel() for count in counts]).view(-1, *shape)

    def join_rows(self, x_t: Tensor) -> Tensor:
        """[T, ...] of [t, ...]."""
        return self.join(x_t, self._counts)

    def sum(self, x: Tensor) -> Tensor:
        """Of integers."""
        return self.join(x[None], [1] * self.workers.size).sum(0)

    @property
    def _counts(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.rows)]

    def _swap(self, parts: Sequence[Tensor], received: Sequence[int]) -> Tensor:
        """What the workers have for this one, end to end. `parts`: for each of them. `received`: elements from each."""
        dtype, width = parts[0].dtype, parts[0].element_size()
        sent_B = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)
        sent = [part.numel() * width for part in parts]
        return self.workers.swap(sent_B, sent, [count * width for count in received]).view(dtype)
