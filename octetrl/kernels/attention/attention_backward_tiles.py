"""The tiles of attention's backward on a GPU (`attention_packed_backward.py`). They decide its speed."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Number of queries (32 or more on a GPU, for TMA) and keys in a tile, and how a kernel is launched."""

    queries: int
    keys: int
    warps: int
    stages: int  # loads in flight in the loop without a mask
    masked_stages: int = 2

    @property
    def launch(self) -> dict[str, int]:
        blocks = {"BLOCK_I": self.queries, "BLOCK_J": self.keys, "num_warps": self.warps}
        return {**blocks, "STAGES": self.stages, "MASKED_STAGES": self.masked_stages}


class BackwardTiles(NamedTuple):
    dq: Tile
    dkdv: Tile


def backward_tiles(head_size: int) -> BackwardTiles:
    """The tiles in use."""
    if head_size == 256:
        return BackwardTiles(dq=Tile(64, 32, 8, 2), dkdv=Tile(32, 64, 8, 2))
    return BackwardTiles(dq=Tile(128, 64, 8, 3), dkdv=Tile(64, 128, 8, 3))
