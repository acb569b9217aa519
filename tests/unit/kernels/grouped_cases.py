"""Loads of experts for the grouped GEMMs: none, one with all rows, ragged, many tiles."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

LOADS = {"ragged": (5, 0, 1, 17, 40), "one has all": (0, 0, 70), "few": (0, 1, 0, 2), "none": (0, 0)}


def first_rows(load: tuple[int, ...]) -> Tensor:
    """Where each expert's rows begin, and the end."""
    return torch.tensor([0, *accumulate(load)], dtype=torch.int32)
