"""The record that a block's training form passes from its forward to its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Gradients = dict[str, Tensor | None]  # of a block's parameters, by their names in the block


@dataclass(slots=True, kw_only=True)
class Saved:
    """The part of a forward that the backward reads. `shapes.blocks.BlockMemory` counts its bytes.

    Subclasses add the values that `Keep` "everything" keeps and that a backward otherwise recomputes.
    """

    costly: Any = None  # slow to recompute: "attention" keeps it as well
    made_with_costly: Any = None  # computed with it; saves work in a backward that follows at once, and is not kept
