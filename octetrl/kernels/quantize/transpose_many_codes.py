"""Transpose the codes of many weights in one launch, as `transpose_codes` does one after another.

A worker that has received the codes of all weights transposes hundreds of them. A program reads its weight from a table
(kernels/table.py) and does what a program of transpose_codes.py does. Weights whose sizes are no multiples of 16 have a
launch of their own.

Layout: pairs of codes [N, K] and their transposed codes [K, N], contiguous, of any dtype of one byte.

N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.quantize.quantize_tokens import TOKEN_BLOCKS
from octetrl.kernels.quantize.transpose_codes import TILE, WARPS, check_shapes, transpose_codes, transpose_tile
from octetrl.kernels.table import ALIGNED, all_aligned, parts_of, table_of

Pair = tuple[Tensor, Tensor]


@triton.jit
def _transpose_many_codes_kernel(
    entry_ptr, table_ptr, COLUMNS: tl.constexpr, TOKEN_BLOCKS: tl.constexpr, TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    table_ptr += tl.load(entry_ptr + tl.program_id(0)) * COLUMNS
    code_ptr = tl.multiple_of(tl.load(table_ptr).to(tl.pointer_type(tl.uint8)), ALIGNED)
    word_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(tl.pointer_type(tl.int32)), ALIGNED)
    N = tl.load(table_ptr + 2).to(tl.int32) * ALIGNED
    K = tl.load(table_ptr + 3).to(tl.int32) * ALIGNED
    tile = tl.program_id(0) - tl.load(table_ptr + 4).to(tl.int32)
    transpose_tile(tile, code_ptr, word_ptr, N, K, TOKEN_BLOCKS, TILE)


def transpose_many_codes_triton(pairs: Sequence[Pair]) -> None:
    """The Triton launcher. Every pair `fits_table`."""
    entries, tiles = [], []
    for codes_NK, out_KN in pairs:
        rows, columns = codes_NK.shape
        entries.append((codes_NK.data_ptr(), out_KN.data_ptr(), rows // ALIGNED, columns // ALIGNED))
        tiles.append(parts_of(rows, TILE) * parts_of(columns, TILE))
    device = pairs[0][0].device
    table = table_of(entries, tiles, device)
    options = {"enable_fp_fusion": False} if device.type == "cuda" else {}
    _transpose_many_codes_kernel[(table.programs,)](
        *table, COLUMNS=table.columns, TOKEN_BLOCKS=TOKEN_BLOCKS, TILE=TILE, ALIGNED=ALIGNED, num_warps=WARPS,
        **options,
    )  # fmt: skip


def transpose_many_codes_reference(pairs: Sequence[Pair]) -> None:
    """The same by one `transpose_codes` each."""
    for codes_NK, out_KN in pairs:
        transpose_codes(codes_NK, out_KN)


def fits_table(codes_NK: Tensor, out_KN: Tensor) -> bool:
    """Whether the table's kernel can take this pair: every row of both begins at 16 bytes."""
    rows, columns = codes_NK.shape
    aligned = not (rows | columns) % ALIGNED and all_aligned(codes_NK, out_KN)
    return aligned and codes_NK.is_contiguous() and codes_NK.numel() > 0


@torch.no_grad()
def transpose_many_codes(pairs: Sequence[Pair]) -> None:
    """Writes the transposed codes [K, N] of each pair, all on one device."""
    for pair in pairs:
        check_shapes(*pair)
    fitting = [pair for pair in pairs if pair[0].is_cuda and fits_table(*pair)]
    transpose_many_codes_reference([pair for pair in pairs if not (pair[0].is_cuda and fits_table(*pair))])
    if fitting:
        transpose_many_codes_triton(fitting)
