"""A digest of weights from sums over their bytes, computed where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from octetrl.kernels.rows.sum_words import mixed_with_places, sum_words

SMALL_BYTES = 1 << 20


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

    Each word is mixed with its place, so two words that changed places show, and two changed signs.
    """
    octets = torch.atleast_2d(tensor.contiguous().view(torch.uint8)).flatten(1)
    return sum_words(octets.view(torch.int64) if octets.shape[1] % 8 == 0 else octets)


def _sum_of_rows(rows: Sequence[Tensor]) -> int:
    """A sum that depends on the order of all rows: each is mixed with its place."""
    if not rows:
        return 0
    return int(mixed_with_places(torch.cat(list(rows))).sum())
