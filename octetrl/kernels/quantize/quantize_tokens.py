"""Quantise a tensor [T, K] to E4M3 in blocks of 128 tokens: the operand of the wgrad GEMM, which sums over T.

    scale = amax / 448,   code = e4m3(clamp(x * 448 / amax, ±448))        fp8/quantize.py, with its special cases

One program takes 128 tokens x 128 columns, with one amax for each column (`square`: one for the tile). It writes the
codes transposed: tokens are contiguous in the result, because `scaled_mm` needs the summed axis contiguous in both
operands. T is padded with zeros to a multiple of 128; zeros change no sum. The bytes equal the reference's. Each
element costs 2 bytes read and 1 + 4/128 written. `square` allows wgrad's faster GEMM, with a coarser scale.

A tile is held as four tiles [32, 128]. The q-th holds tokens q, 4 + q, 8 + q and so on. A thread then has four
neighbouring tokens of a column and packs their codes into one word without an exchange. The transpose through shared
memory moves words, not bytes, and a column's 128 bytes are stored as eight 16-byte words. The tile stays in BF16, two
values in a register, and is converted to float32 at each use.

Layout: x [T, K] with K contiguous; codes [K, T']; the scale is stored as [T'/128, K] and returned transposed, with
strides (1, K). square: scale [ceil(K/128), T'/128], contiguous.

T tokens, T' padded tokens, K columns, G groups of four tokens, C columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_tokens_reference
from octetrl.kernels.instructions import bf16_to_float, e4m3_code, to_bf16
from octetrl.kernels.quantize.quantize_activation import block_scale, magnitude_bits

# Successive programs take this many token blocks, then the next columns. Both the reads and the transposed writes then
# have neighbours in time.
TOKEN_BLOCKS = 8
WARPS = 4
REGISTERS: int | None = None  # limit for a thread; None leaves it to the compiler


@triton.jit
def tile_place(tile, T, columns, TOKEN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """(token block, column block) of the tile-th program."""
    blocks, column_blocks = tl.cdiv(T, BLOCK), tl.cdiv(columns, BLOCK)
    first = tile // (TOKEN_BLOCKS * column_blocks) * TOKEN_BLOCKS
    height = tl.minimum(blocks - first, TOKEN_BLOCKS)
    inner = tile - first * column_blocks
    return first + inner % height, inner // height


@triton.jit
def load_quarter(x_ptr, row_stride, tokens_left, columns_left, QUARTER: tl.constexpr, BLOCK: tl.constexpr):
    """[32, 128] of the tile that starts at x_ptr: tokens QUARTER, 4 + QUARTER, ...; zeros outside."""
    token_G = tl.arange(0, BLOCK // 4) * 4 + QUARTER
    column_C = tl.arange(0, BLOCK)
    inside_GC = (token_G < tokens_left)[:, None] & (column_C < columns_left)[None, :]
    return tl.load(x_ptr + token_G[:, None] * row_stride + column_C[None, :], mask=inside_GC, other=0.0)


@triton.jit
def magnitudes(x, ON_GPU: tl.constexpr):
    """`magnitude_bits` of BF16 x."""
    return magnitude_bits(bf16_to_float(x, ON_GPU, True))


@triton.jit
def tile_magnitudes(x0_GC, x1_GC, x2_GC, x3_GC, ON_GPU: tl.constexpr):
    """The largest magnitude bits of each group and column, over the four quarters."""
    even_GC = tl.maximum(magnitudes(x0_GC, ON_GPU), magnitudes(x2_GC, ON_GPU))
    return tl.maximum(even_GC, tl.maximum(magnitudes(x1_GC, ON_GPU), magnitudes(x3_GC, ON_GPU)))


@triton.jit
def store_tokens(
    x0_GC, x1_GC, x2_GC, x3_GC, amax_C, code_ptr, scale_ptr, padded_T, columns_left,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the codes of a tile (BF16, in quarters), transposed, from code_ptr on, and its scale. amax_C holds bits.

    A gather by position changes only which thread holds what. Between the two gathers one thread divides for one
    column; otherwise each thread would divide for every column that it holds.
    """
    column_C, token_B = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    if SQUARE:
        scale, inverse = block_scale(tl.max(amax_C, 0), POWER_OF_TWO)
        tl.store(scale_ptr, scale)
        inverse_1C = inverse
    else:
        scale_C, inverse_C = block_scale(tl.gather(amax_C, column_C, 0), POWER_OF_TWO)
        tl.store(scale_ptr + column_C, scale_C, mask=column_C < columns_left)
        inverse_1C = tl.gather(inverse_C, column_C, 0)[None, :]
    even_GC2 = tl.join(bf16_to_float(x0_GC, ON_GPU, True) * inverse_1C, bf16_to_float(x2_GC, ON_GPU, True) * inverse_1C)
    odd_GC2 = tl.join(bf16_to_float(x1_GC, ON_GPU, True) * inverse_1C, bf16_to_float(x3_GC, ON_GPU, True) * inverse_1C)
    code_GC22 = e4m3_code(tl.join(even_GC2, odd_GC2), ON_GPU)
    code_CT = tl.reshape(tl.permute(code_GC22, (1, 0, 2, 3)), (BLOCK, BLOCK))
    inside_C1 = (column_C < columns_left)[:, None]
    tl.store(code_ptr + column_C[:, None] * padded_T + token_B[None, :], code_CT, mask=inside_C1)


@triton.jit(do_not_specialize=["T"])
def _quantize_tokens_kernel(
    x_ptr, code_ptr, scale_ptr, T, K, row_stride, padded_T,
    POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr, ON_GPU: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, column_block = tile_place(tl.program_id(0), T, K, TOKEN_BLOCKS, BLOCK)
    token, column = block.to(tl.int64) * BLOCK, column_block.to(tl.int64) * BLOCK
    x_ptr += token * row_stride + column
    left = T - block * BLOCK, K - column_block * BLOCK
    x0_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 0, BLOCK), ON_GPU)
    x1_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 1, BLOCK), ON_GPU)
    x2_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 2, BLOCK), ON_GPU)
    x3_GC = to_bf16(load_quarter(x_ptr, row_stride, left[0], left[1], 3, BLOCK), ON_GPU)
    if SQUARE:
        scale_ptr += column_block.to(tl.int64) * (padded_T // BLOCK) + block
    else:
        scale_ptr += block.to(tl.int64) * K + column
    amax_C = tl.max(tile_magnitudes(x0_GC, x1_GC, x2_GC, x3_GC, ON_GPU), 0)
    store_tokens(
        x0_GC, x1_GC, x2_GC, x3_GC, amax_C, code_ptr + column * padded_T + token, scale_ptr, padded_T, left[1],
        POWER_OF_TWO, SQUARE, ON_GPU, BLOCK,
    )  # fmt: skip


def empty_tokens(tokens: int, columns: int, square: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes [K, T'] as bytes, scale as it is stored), for a kernel to fill. `as_tokens` turns them into a
    Quantized."""
    blocks = triton.cdiv(tokens, BLOCK)
    shape = (triton.cdiv(columns, BLOCK), blocks) if square else (blocks, columns)
    codes = torch.empty(columns, blocks * BLOCK, dtype=torch.uint8, device=device)
    return codes, torch.empty(shape, dtype=torch.float32, device=device)


def as_tokens(codes: Tensor, scale: Tensor, square: bool) -> Quantized:
    return Quantized(codes.view(E4M3), scale if square else scale.t())


def quantize_tokens_triton(x_TK: Tensor, power_of_two: bool = False, square: bool = False) -> Quantized:
    """The Triton launcher: x_TK BF16 or float32, any T and K."""
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    tokens, columns = x_TK.shape
    codes, scale = empty_tokens(tokens, columns, square, x_TK.device)
    if tokens:
        _quantize_tokens_kernel[(triton.cdiv(tokens, BLOCK) * triton.cdiv(columns, BLOCK),)](
            x_TK, codes, scale, tokens, columns, x_TK.stride(0), codes.shape[1],
            POWER_OF_TWO=power_of_two, SQUARE=square, ON_GPU=x_TK.is_cuda, TOKEN_BLOCKS=TOKEN_BLOCKS, BLOCK=BLOCK,
            num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip
    return as_tokens(codes, scale, square)


def quantize_tokens(x_TK: Tensor, power_of_two: bool = False, square: bool = False) -> Quantized:
    """[T, K] -> codes [K, T'] E4M3, scale [K, T'/128] float32 (on CUDA with strides (1, K)). With `square` the scale is
    [ceil(K/128), T'/128].
    """
    assert x_TK.dim() == 2, f"expected [T, K], got {tuple(x_TK.shape)}"
    quantize = quantize_tokens_triton if x_TK.is_cuda else quantize_tokens_reference
    return quantize(x_TK, power_of_two, square)
