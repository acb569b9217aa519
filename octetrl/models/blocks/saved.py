"""What a block's training form hands from its forward to its backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

Gradients = dict[str, Tensor | None]  # of a block's parameters, by their names in the block


@dataclass(slots=True, kw_only=True)
class Saved:
    """What a block's backward reads of its forward; `config.blocks.BlockMemory` counts the bytes.

    Subclasses add what `Keep` "everything" keeps, or a backward makes again.
    """

    costly: Any = None  # slow to make again: "attention" keeps it as well
    made_with_costly: Any = None  # spares a backward that follows at once some work; never kept for it
