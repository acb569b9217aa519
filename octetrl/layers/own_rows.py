"""The rows that are kept of an FP8 weight whose memory is freed (layers/weight_memory.py).

N out_features, K in_features, R own rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OwnRows(NamedTuple):
    """Rows of a weight from row `first` on, in memory of their own."""

    first: int
    rows_RK: Tensor


def weight_without_memory(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """A tensor [N, K] that has a shape and no memory."""
    weight_NK = torch.empty(out_features, in_features, dtype=dtype, device=device)
    weight_NK.untyped_storage().resize_(0)
    return weight_NK
