"""Transpose the codes of a weight: [N, K] -> [K, N], the operand of dgrad's GEMM.

    transposed[k, n] = codes[n, k]        bytes; no value is read

A worker that quantises a weight gets both orientations in one read (quantize_weight.py). A worker that receives codes
from others has the rows alone. `copy_` of a transposed view moves single bytes, at less than a tenth of the memory's
speed (lab/kernels/quantize.py). Here a thread reads four neighbouring rows of a column and packs their bytes
into one word, so what goes through shared memory and to the result are words. transpose_many_codes.py takes all weights
of a model in one launch.

Each element costs 1 byte read and 1 written.

Layout: codes [N, K] and transposed [K, N] contiguous, of any dtype of one byte. N is a multiple of 4.

N rows, K columns, G groups of four rows, C columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.quantize.quantize_tokens import TOKEN_BLOCKS, tile_place

TILE = 128  # rows and columns
WARPS = 4


@triton.jit
def _load_bytes(place_GC, inside_GC):
    return tl.load(place_GC, mask=inside_GC, other=0).to(tl.int32)


@triton.jit
def transpose_tile(tile, code_ptr, word_ptr, N, K, TOKEN_BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Transpose the tile-th tile of a weight's codes."""
    row_block, column_block = tile_place(tile, N, K, TOKEN_BLOCKS, TILE)
    group_G = row_block.to(tl.int64) * (TILE // 4) + tl.arange(0, TILE // 4)
    column_C = column_block.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside_GC = (group_G < N // 4)[:, None] & (column_C < K)[None, :]
    place_GC = code_ptr + group_G[:, None] * 4 * K + column_C[None, :]
    low_GC = _load_bytes(place_GC, inside_GC) | (_load_bytes(place_GC + K, inside_GC) << 8)
    high_GC = _load_bytes(place_GC + 2 * K, inside_GC) | (_load_bytes(place_GC + 3 * K, inside_GC) << 8)
    word_CG = tl.trans(low_GC | (high_GC << 16))
    inside_CG = (column_C < K)[:, None] & (group_G < N // 4)[None, :]
    tl.store(word_ptr + column_C[:, None] * (N // 4) + group_G[None, :], word_CG, mask=inside_CG)


@triton.jit
def _transpose_codes_kernel(code_ptr, word_ptr, N, K, TOKEN_BLOCKS: tl.constexpr, TILE: tl.constexpr):
    transpose_tile(tl.program_id(0), code_ptr, word_ptr, N, K, TOKEN_BLOCKS, TILE)


def transpose_codes_triton(codes_NK: Tensor, out_KN: Tensor) -> Tensor:
    """The Triton launcher."""
    rows, columns = codes_NK.shape
    bytes_NK, words = codes_NK.view(torch.uint8), out_KN.view(torch.int32)
    options = {"enable_fp_fusion": False} if codes_NK.is_cuda else {}
    _transpose_codes_kernel[(triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),)](
        bytes_NK, words, rows, columns, TOKEN_BLOCKS=TOKEN_BLOCKS, TILE=TILE, num_warps=WARPS, **options
    )
    return out_KN


def transpose_codes_reference(codes_NK: Tensor, out_KN: Tensor) -> Tensor:
    """The same in plain torch."""
    return out_KN.copy_(codes_NK.t())


def check_shapes(codes_NK: Tensor, out_KN: Tensor) -> None:
    """Whether `out_KN` can be the transposed codes."""
    assert codes_NK.dim() == 2 and codes_NK.element_size() == 1, f"expected bytes [N, K], got {codes_NK.shape}"
    assert out_KN.shape == codes_NK.shape[::-1] and out_KN.is_contiguous(), "the result is contiguous [K, N]"


@torch.no_grad()
def transpose_codes(codes_NK: Tensor, out_KN: Tensor | None = None) -> Tensor:
    """[N, K] -> [K, N], contiguous, into `out_KN` if given. Any N and K; a GPU is fast if N is a multiple of 4."""
    rows, columns = codes_NK.shape
    if out_KN is None:
        out_KN = torch.empty(columns, rows, dtype=codes_NK.dtype, device=codes_NK.device)
    check_shapes(codes_NK, out_KN)
    fast = codes_NK.is_cuda and codes_NK.is_contiguous() and rows % 4 == 0 and codes_NK.numel() > 0
    return (transpose_codes_triton if fast else transpose_codes_reference)(codes_NK, out_KN)
