"""What is left of a weight whose linear does not keep it whole (weight_memory.py)."""

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
