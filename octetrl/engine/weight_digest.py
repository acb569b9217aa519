"""A digest of weights from sums over their bytes, computed where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def digest_of(version: int, tensors: Iterable[Tensor]) -> str:
    """Of policy version `version` and the bytes of these tensors, in their order."""
    return digest_of_rows(version, [row_sums(tensor) for tensor in tensors])


def digest_of_rows(version: int, rows: Sequence[Tensor]) -> str:
    """The same from `row_sums` of the tensors."""
    return hashlib.sha256(repr((version, _sum_of_rows(rows))).encode()).hexdigest()[:16]


def row_sums(tensor: Tensor) -> Tensor:
    """int64 sums of the bytes of each row, in words of eight bytes if possible. They may wrap around."""
    octets = torch.atleast_2d(tensor.contiguous().view(torch.uint8)).flatten(1)
    words = octets.view(torch.int64) if octets.shape[1] % 8 == 0 else octets
    return words.sum(dim=1, dtype=torch.int64)


def _sum_of_rows(rows: Sequence[Tensor]) -> int:
    """A sum that depends on the order of all rows: each is multiplied by its own odd number."""
    if not rows:
        return 0
    all_rows = torch.cat(list(rows))
    weights = 2 * torch.arange(all_rows.numel(), device=all_rows.device, dtype=torch.int64) + 1
    return int((all_rows * weights).sum())
