"""Quantise a tensor [T, K] in both orientations in one read: rows for forward and dgrad, tokens for wgrad.

    rows     quantize_activation(x)    blocks of 1 x 128      codes [T, K], scale [T, ceil(K/128)]
    tokens   quantize_tokens(x)        blocks of 128 x 1      codes [K, T'], scale [K, T'/128]
             square: 128 x 128                                scale [ceil(K/128), T'/128]

The bytes equal those of the two calls. One program takes 128 tokens x 128 columns, so it holds whole blocks of both
kinds. quantize_tokens.py explains how the tile is held and transposed. Each element costs 2 bytes read and 2 + 8/128
written (square: 2 + 4/128). That is 4 bytes moved; the two calls move 6.

Layout: x [T, K] with K contiguous and any row stride. Scales have the strides that scaled_mm requires: rows (1, T),
tokens (1, K), square contiguous.

T tokens, T' padded tokens, K columns, G groups of four tokens, C columns of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_activation_reference, quantize_tokens_reference
from octetrl.kernels.instructions import bf16_to_float, e4m3_code, to_bf16
from octetrl.kernels.quantize.quantize_activation import block_scale, empty_rows, scale_rows
from octetrl.kernels.quantize.quantize_tokens import (
    TOKEN_BLOCKS,
    as_tokens,
    empty_tokens,
    load_quarter,
    magnitudes,
    store_tokens,
    tile_magnitudes,
    tile_place,
)

WARPS = 4
REGISTERS: int | None = 168  # limit for a thread: three programs fit an SM


class BothWays(NamedTuple):
    """One tensor's codes along its rows, and along its tokens (transposed)."""

    rows: Quantized
    tokens: Quantized


@triton.jit
def store_quarter(
    x_GC, inverse_T, code_ptr, row_stride, tokens_left, columns_left,
    QUARTER: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the codes of a quarter's rows. inverse_T holds the inverses of the whole tile."""
    token_G = tl.arange(0, BLOCK // 4) * 4 + QUARTER
    column_C = tl.arange(0, BLOCK)
    inside_GC = (token_G < tokens_left)[:, None] & (column_C < columns_left)[None, :]
    code_GC = e4m3_code(bf16_to_float(x_GC, ON_GPU, True) * tl.gather(inverse_T, token_G, 0)[:, None], ON_GPU)
    tl.store(code_ptr + token_G[:, None] * row_stride + column_C[None, :], code_GC, mask=inside_GC)


@triton.jit
def store_both(
    x0_GC, x1_GC, x2_GC, x3_GC, row_code_ptr, row_scale_ptr, token_code_ptr, token_scale_ptr,
    row_stride, padded_T, tokens_left, columns_left,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a tile (BF16, in quarters) in both orientations. The pointers are to its first elements; row_stride belongs
    to the row codes. All maxima are computed first, so that no magnitude stays in a register until the columns are
    stored.
    """
    even_G2 = tl.join(tl.max(magnitudes(x0_GC, ON_GPU), 1), tl.max(magnitudes(x2_GC, ON_GPU), 1))
    odd_G2 = tl.join(tl.max(magnitudes(x1_GC, ON_GPU), 1), tl.max(magnitudes(x3_GC, ON_GPU), 1))
    amax_T = tl.reshape(tl.join(even_G2, odd_G2), (BLOCK,))
    amax_C = tl.max(tile_magnitudes(x0_GC, x1_GC, x2_GC, x3_GC, ON_GPU), 0)
    token_T = tl.arange(0, BLOCK)
    scale_T, inverse_T = block_scale(tl.gather(amax_T, token_T, 0), POWER_OF_TWO)
    tl.store(row_scale_ptr + token_T, scale_T, mask=token_T < tokens_left)
    left = tokens_left, columns_left
    store_quarter(x0_GC, inverse_T, row_code_ptr, row_stride, left[0], left[1], 0, ON_GPU, BLOCK)
    store_quarter(x1_GC, inverse_T, row_code_ptr, row_stride, left[0], left[1], 1, ON_GPU, BLOCK)
    store_quarter(x2_GC, inverse_T, row_code_ptr, row_stride, left[0], left[1], 2, ON_GPU, BLOCK)
    store_quarter(x3_GC, inverse_T, row_code_ptr, row_stride, left[0], left[1], 3, ON_GPU, BLOCK)
    store_tokens(
        x0_GC, x1_GC, x2_GC, x3_GC, amax_C, token_code_ptr, token_scale_ptr, padded_T, columns_left,
        POWER_OF_TWO, SQUARE, ON_GPU, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _quantize_both_kernel(
    x_ptr, row_code_ptr, row_scale_ptr, token_code_ptr, token_scale_ptr, T, K, row_stride, padded_T,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr, ON_GPU: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, column_block = tile_place(tl.program_id(0), T, K, TOKEN_BLOCKS, BLOCK)
    token, column = block.to(tl.int64) * BLOCK, column_block.to(tl.int64) * BLOCK
    left = T - block * BLOCK, K - column_block * BLOCK
    x_ptr += token * row_stride + column
    x0_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 0, BLOCK), ON_GPU)
    x1_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 1, BLOCK), ON_GPU)
    x2_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 2, BLOCK), ON_GPU)
    x3_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 3, BLOCK), ON_GPU)
    row_code_ptr += token * K + column
    row_scale_ptr += column_block.to(tl.int64) * scale_rows(T) + token
    token_code_ptr += column * padded_T + token
    if SQUARE:
        token_scale_ptr += column_block.to(tl.int64) * (padded_T // BLOCK) + block
    else:
        token_scale_ptr += block.to(tl.int64) * K + column
    store_both(
        x0_GC, x1_GC, x2_GC, x3_GC, row_code_ptr, row_scale_ptr, token_code_ptr, token_scale_ptr,
        K, padded_T, left[0], left[1], POWER_OF_TWO, SQUARE, ON_GPU, BLOCK,
    )  # fmt: skip


def quantize_both_triton(x_TK: Tensor, power_of_two: bool = False, square: bool = False) -> BothWays:
    """The Triton launcher: x_TK BF16 or float32, any T and K."""
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    tokens, columns = x_TK.shape
    column_blocks = triton.cdiv(columns, BLOCK)
    row_codes, row_scale = empty_rows(tokens, columns, x_TK.device)
    codes, scale = empty_tokens(tokens, columns, square, x_TK.device)
    if tokens:
        _quantize_both_kernel[(triton.cdiv(tokens, BLOCK) * column_blocks,)](
            x_TK, row_codes, row_scale, codes, scale, tokens, columns, x_TK.stride(0), codes.shape[1],
            POWER_OF_TWO=power_of_two, SQUARE=square, ON_GPU=x_TK.is_cuda, TOKEN_BLOCKS=TOKEN_BLOCKS, BLOCK=BLOCK,
            num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip
    return BothWays(Quantized(row_codes.view(E4M3), row_scale), as_tokens(codes, scale, square))


def quantize_both_reference(x_TK: Tensor, power_of_two: bool = False, square: bool = False) -> BothWays:
    """The same in plain torch, from the references of its two parts."""
    rows = quantize_activation_reference(x_TK, power_of_two)
    return BothWays(rows, quantize_tokens_reference(x_TK, power_of_two, square))


def quantize_both(x_TK: Tensor, power_of_two: bool = False, *, square: bool = False) -> BothWays:
    """[T, K] -> its codes along rows and along tokens. `square` makes the tokens' blocks 128 x 128."""
    assert x_TK.dim() == 2, f"expected [T, K], got {tuple(x_TK.shape)}"
    run = quantize_both_triton if x_TK.is_cuda else quantize_both_reference
    return run(x_TK, power_of_two, square)
