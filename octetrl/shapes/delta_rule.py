"""The sizes of gated DeltaNet's recurrence, and what a sequence keeps of it in the engine. No torch.

A layer keeps, for each sequence, a state and the rows of the chunk that is not yet in the state
(kernels/delta_rule/delta_rule_reference.py explains why), and the last inputs of its convolution.
"""

from __future__ import annotations

from typing import Final, NamedTuple

CHUNK: Final = 64  # rows of a chunk; chunks begin at a sequence's first token
SLICE: Final = 64  # columns of V that one program computes: the shortest long side of wgmma


class DeltaShape(NamedTuple):
    """Heads of q and k, heads of v, and their sizes; value head h reads key head h // (value_heads / key_heads)."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int = 4  # of the causal convolution

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, then k, then v."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def slices(self) -> int:
        return -(-self.value_size // SLICE)

    def conv_rows(self, rows: int) -> int:
        """Rows that the convolution keeps of a sequence if a forward adds up to `rows`, of which any may be undone: the
        last ones, and those that end the last two chunks."""
        return 3 * (self.taps - 1) + rows

    def slot_bytes(self, conv_rows: int, element_size: int = 2) -> int:
        """Bytes that one layer keeps of one sequence. `element_size`: of the model's dtype."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        state = 4 * values * self.key_size
        open_rows = CHUNK * (element_size * (2 * keys + values) + 8 * self.value_heads)
        return state + open_rows + 4 * self.value_heads * self.slices + element_size * conv_rows * self.channels
