"""Tensors of a checkpoint that hold the matrices of all experts, as rows of our parameter and back.

    [X, rows, K]    or turned [X, K, rows]    ->    [X rows, K]        biases [X, rows] -> [X rows]

With interleaved parts (gpt-oss: gate, up, gate, up, ...) the rows of a part follow one another here.

X experts, K in_features.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.models.weight_files import FilePiece, Stack


def as_rows(stack: Stack, held: Tensor) -> Tensor:
    """Our rows of some experts from what a file holds of them. A view where the layout is the same."""
    held = held.mT if stack.turned else held
    if stack.interleaved > 1:
        held = held.unflatten(1, (-1, stack.interleaved)).transpose(1, 2).flatten(1, 2)
    return held.flatten(0, 1)


def as_file(piece: FilePiece, rows: Tensor) -> Tensor:
    """The inverse, of all experts."""
    if piece.stack is None:
        return rows
    held = rows.unflatten(0, (piece.shape[0], piece.stack.matrix_rows))
    if piece.stack.interleaved > 1:
        held = held.unflatten(1, (piece.stack.interleaved, -1)).transpose(1, 2).flatten(1, 2)
    return held.mT.contiguous() if piece.stack.turned else held
