"""A digest of weights from sums over their bytes, computed where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.kernels.rows.sum_words import mixed_with_places, sum_words


def digest_of(version: int, tensors: Sequence[Tensor]) -> str:
    """Of policy version `version` and the bytes of these tensors, in their order."""
    return digest_and_flags(version, tensors, ())[0]


def digest_and_flags(version: int, tensors: Sequence[Tensor], flags: Sequence[Tensor]) -> tuple[str, list[bool]]:
    """`digest_of`, and the values of boolean scalars, which are read from the device in the same host synchronisation.

    Each word is mixed with its place in its row, and each row's sum with the row's place among the rows of all tensors.
    So two words that changed places show, two rows or tensors, and two changed signs. Sums may wrap around.
    """
    total = mixed_with_places(sum_words(tensors)).sum()
    read = [total] if not flags else [torch.stack(list(flags)).long(), total.to(flags[0].device)]
    *values, number = torch.cat([one.view(-1) for one in read]).tolist()
    return hashlib.sha256(repr((version, number)).encode()).hexdigest()[:16], [bool(value) for value in values]
