"""A digest of weights from sums over their bytes, computed where they are.

R rows, W words of a row, P rows of a part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

SMALL_BYTES = 1 << 20
PART = 1 << 23  # words of eight bytes whose products are in memory at once


def digest_of(version: int, tensors: Iterable[Tensor]) -> str:
    """Of policy version `version` and the bytes of these tensors, in their order."""
    return hashlib.sha256(repr((version, _sum_of_rows(rows_of(list(tensors))))).encode()).hexdigest()[:16]


def rows_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`row_sums` of each. Small ones of equal shape are added together: a model has hundreds of scales and norms, and
    each sum is a few launches."""
    rows: dict[int, Tensor] = {}
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.nbytes < SMALL_BYTES:
            alike.setdefault((tensor.dtype, tensor.shape), []).append(place)
        else:
            rows[place] = row_sums(tensor)
    for places in alike.values():
        together = torch.stack([tensors[place].contiguous().view(torch.uint8) for place in places])
        sums = row_sums(together if together.dim() == 2 else together.flatten(0, 1)).view(len(places), -1)
        rows |= dict(zip(places, sums.unbind(), strict=True))
    return [rows[place] for place in range(len(tensors))]


def row_sums(tensor: Tensor) -> Tensor:
    """int64 sums over each row, in words of eight bytes if possible. They may wrap around.

    Each word is multiplied by an odd number of its place, so two words that changed places show. Parts of `PART` words
    bound the memory of the products.
    """
    octets = torch.atleast_2d(tensor.contiguous().view(torch.uint8)).flatten(1)
    words_RW = octets.view(torch.int64) if octets.shape[1] % 8 == 0 else octets
    factor_W = _factors_of_row(words_RW.shape[1], words_RW.device)
    step = max(1, PART // max(1, words_RW.shape[1]))
    sums = [(part_PW * factor_W).sum(dim=1) for part_PW in words_RW.split(step)]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


@lru_cache(maxsize=16)
def _factors_of_row(count: int, device: torch.device) -> Tensor:
    """Kept, because a model's tensors have few widths and each costs three launches."""
    return _odd_factors(count, device)


def _odd_factors(count: int, device: torch.device) -> Tensor:
    """Different odd int64 numbers with bits in all places."""
    return (torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB) | 1


def _sum_of_rows(rows: Sequence[Tensor]) -> int:
    """A sum that depends on the order of all rows: each is multiplied by its own odd number."""
    if not rows:
        return 0
    all_rows = torch.cat(list(rows))
    return int((all_rows * _odd_factors(all_rows.numel(), all_rows.device)).sum())
