"""What the engine keeps of gated DeltaNet: one slot of one layer for each sequence.

    state       S transposed, at the start of chunk `chunk`: float32, as two planes of 16 bits
    open rows   k, d and the cumulative decay of the rows since then; row p % 64 belongs to position p, of k and the
                decay row p % 128: programs that share them read a full chunk while the next one's first row is written
    conv        the convolution's last inputs: a ring, in which row p % ring belongs to position p; behind it, of even
                chunks and of odd ones, those of a chunk's last taps - 1 positions, which are not in the ring

`high` is the float32 rounded to BF16, ties away from zero, and all that decode reads; `low` are the lower 16 bits.
Together they are the float32 (a NaN becomes the quiet NaN), in its memory.

Chunk 0 starts from S = 0, which is not read: a slot needs no clearing. A full chunk enters the state when the next
chunk's first row is computed, so any open row may be written again. A sequence may therefore go back to any of the
last positions that the ring has, and always to the start of chunk `chunk`: a copy of a slot is a snapshot of that.

H heads of q and k or of v, V and K their sizes, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.shapes.delta_rule import CHUNK, DeltaShape

QUIET_NAN = 0x7FC00000


class DeltaState(NamedTuple):
    """The slots of one layer."""

    high: Tensor  # [slots, value heads, V, K] BF16
    low: Tensor  # the same, int16
    open_k: Tensor  # [slots, key heads, 128, K], the model's dtype
    open_d: Tensor  # [slots, value heads, 64, V], the model's dtype
    open_gamma: Tensor  # [slots, value heads, 128] float32
    chunk: Tensor  # [slots, value heads, slices of V] int32; a slice has 64 columns
    conv: Tensor  # [slots, conv_rows, C], the model's dtype

    def of_layer(self, layer: int) -> DeltaState:
        """The slots of one layer, of states whose tensors have layers as their first axis."""
        return DeltaState(*(kept[layer] for kept in self))


class SlotRows(NamedTuple):
    """Which rows of a forward belong to which slot. Every row belongs to a sequence.

    `one_chunk`: the rows of each sequence lie in one chunk, as those of a decode forward do.
    """

    cu_seqlens_B1: Tensor  # int32
    slot_B: Tensor  # int64; -1: idle, its rows become zero
    first_position_B: Tensor  # int64; position of the sequence's first row
    max_seqlen: int
    one_chunk: bool = False


def empty_state(
    shape: DeltaShape,
    slots: int,
    conv_rows: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    layers: tuple[int] | tuple[()] = (),
) -> DeltaState:
    """Slots of unspecified content. `layers`: their number, if the tensors are to have them as their first axis."""
    key_heads, value_heads, K, V, _ = shape

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*layers, slots, *sizes, dtype=dtype, device=device)

    return DeltaState(
        high=empty(value_heads, V, K, dtype=torch.bfloat16),
        low=empty(value_heads, V, K, dtype=torch.int16),
        open_k=empty(key_heads, 2 * CHUNK, K),
        open_d=empty(value_heads, CHUNK, V),
        open_gamma=empty(value_heads, 2 * CHUNK, dtype=torch.float32),
        chunk=empty(value_heads, shape.slices, dtype=torch.int32),
        conv=empty(conv_rows, shape.channels),
    )


def copy_slot(state: DeltaState, source: int, target: int) -> None:
    """Copy a slot in all layers, which are the tensors' first axis: one launch for each tensor."""
    for kept in state:
        kept[:, target].copy_(kept[:, source])


def split_planes(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 as its high plane (BF16, ties away from zero) and its low one (int16)."""
    bits = torch.where(x.isnan(), QUIET_NAN, x.view(torch.int32))
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return high, bits.to(torch.int16)


def join_planes(high: Tensor, low: Tensor) -> Tensor:
    """The float32 that was split."""
    low_bits = low.to(torch.int32)
    upper = high.view(torch.int16).to(torch.int32) + (low_bits >> 31)
    return ((upper << 16) | (low_bits & 0xFFFF)).view(torch.float32)
