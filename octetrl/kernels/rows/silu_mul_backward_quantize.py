"""The backward of SiLU(gate) * up, quantised in both orientations, and the product as wgrad's operand, in one pass.

    dgate_up = silu_mul_backward(gate_up, dy)     kernels/rows/silu_mul.py, the same expressions, each rounded to BF16
    both     = quantize_both(dgate_up)            rows for dgrad, tokens for wgrad of gate_up
    y        = quantize_tokens(silu_mul(gate_up)) tokens for wgrad of down, `square` or not

The bytes equal those of these calls, and dgate_up and y are never stored in BF16. One program computes one of the three
results, for 128 tokens x 128 columns. Three neighbouring programs read the same places, the first from memory and the
others from L2. No program holds more than one tile; all three results at once would need twice the registers. F must be
a multiple of 128. Otherwise a block of the row [2F] would contain both gate and up, and the separate kernels run
instead. quantize_tokens.py explains how a tile is held.

Each element of y costs 6 bytes read and 5 + 20/128 written. The separate calls move 26.

Layout: gate_up [T, 2F] and dy [T, F] contiguous. Scales have the strides that scaled_mm requires.

T tokens, T' padded tokens, F intermediate size, G groups of four tokens, C columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_tokens_reference
from octetrl.kernels.instructions import bf16_to_float, sigmoid, to_bf16
from octetrl.kernels.quantize.quantize_activation import empty_rows, scale_rows
from octetrl.kernels.quantize.quantize_both import (
    BothWays,
    quantize_both_reference,
    quantize_both_triton,
    store_both,
)
from octetrl.kernels.quantize.quantize_tokens import (
    TOKEN_BLOCKS,
    as_tokens,
    empty_tokens,
    load_quarter,
    quantize_tokens_triton,
    store_tokens,
    tile_magnitudes,
    tile_place,
)
from octetrl.kernels.rows.silu_mul import (
    silu_mul_backward_reference,
    silu_mul_backward_triton,
    silu_mul_reference,
    silu_mul_triton,
)

WARPS = 8
REGISTERS: int | None = 80  # limit for a thread: three programs fit an SM; four warps spill at any limit
PARTS = 3  # gate's gradient, up's gradient, y
PARTS_ADJACENT = True  # the three parts of one tile follow one another; otherwise all tiles of one part come first


@triton.jit
def _load_part(
    gate_up_ptr, dy_ptr, tokens_left,
    PART: tl.constexpr, QUARTER: tl.constexpr, SIZE: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A quarter of dgate, dup or y, rounded to BF16, with exactly the expressions of silu_mul.py."""
    gate_GC = bf16_to_float(load_quarter(gate_up_ptr, 2 * SIZE, tokens_left, BLOCK, QUARTER, BLOCK), ON_GPU)
    sigmoid_GC = sigmoid(gate_GC, ON_GPU)
    if PART != 1:
        up_GC = load_quarter(gate_up_ptr + SIZE, 2 * SIZE, tokens_left, BLOCK, QUARTER, BLOCK)
        up_GC = bf16_to_float(up_GC, ON_GPU)
    if PART != 2:
        dy_GC = bf16_to_float(load_quarter(dy_ptr, SIZE, tokens_left, BLOCK, QUARTER, BLOCK), ON_GPU)
    if PART == 0:
        part_GC = dy_GC * up_GC * sigmoid_GC * (1.0 + gate_GC * (1.0 - sigmoid_GC))
    elif PART == 1:
        part_GC = dy_GC * gate_GC * sigmoid_GC
    else:
        part_GC = gate_GC * sigmoid_GC * up_GC
    return to_bf16(part_GC, ON_GPU)


@triton.jit
def _gradient_part(
    gate_up_ptr, dy_ptr, row_code_ptr, row_scale_ptr, token_code_ptr, token_scale_ptr, T, padded_T, tokens_left,
    PART: tl.constexpr, SIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dgate's tile (PART 0) or dup's (1), in both orientations. Pointers are to dgate's first elements."""
    x0_GC = _load_part(gate_up_ptr, dy_ptr, tokens_left, PART, 0, SIZE, ON_GPU, BLOCK)
    x1_GC = _load_part(gate_up_ptr, dy_ptr, tokens_left, PART, 1, SIZE, ON_GPU, BLOCK)
    x2_GC = _load_part(gate_up_ptr, dy_ptr, tokens_left, PART, 2, SIZE, ON_GPU, BLOCK)
    x3_GC = _load_part(gate_up_ptr, dy_ptr, tokens_left, PART, 3, SIZE, ON_GPU, BLOCK)
    store_both(
        x0_GC, x1_GC, x2_GC, x3_GC,
        row_code_ptr + PART * SIZE, row_scale_ptr + PART * (SIZE // BLOCK) * scale_rows(T).to(tl.int64),
        token_code_ptr + PART * SIZE * padded_T.to(tl.int64), token_scale_ptr + PART * SIZE,
        2 * SIZE, padded_T, tokens_left, BLOCK, POWER_OF_TWO, False, ON_GPU, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _silu_mul_backward_quantize_kernel(
    gate_up_ptr, dy_ptr, row_code_ptr, row_scale_ptr, token_code_ptr, token_scale_ptr, y_code_ptr, y_scale_ptr,
    T, padded_T, SIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr, SQUARE: tl.constexpr, ON_GPU: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, PARTS: tl.constexpr, ADJACENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if ADJACENT:
        tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    else:
        tiles = tl.num_programs(0) // PARTS
        tile, part = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    block, column_block = tile_place(tile, T, SIZE, TOKEN_BLOCKS, BLOCK)
    token, column = block.to(tl.int64) * BLOCK, column_block.to(tl.int64) * BLOCK
    left = T - block * BLOCK
    gate_up_ptr += token * (2 * SIZE) + column
    dy_ptr += token * SIZE + column
    row_code_ptr += token * (2 * SIZE) + column
    row_scale_ptr += column_block.to(tl.int64) * scale_rows(T) + token
    token_code_ptr += column * padded_T + token
    token_scale_ptr += block.to(tl.int64) * (2 * SIZE) + column
    if part == 0:
        _gradient_part(
            gate_up_ptr, dy_ptr, row_code_ptr, row_scale_ptr, token_code_ptr, token_scale_ptr, T, padded_T, left,
            0, SIZE, POWER_OF_TWO, ON_GPU, BLOCK,
        )  # fmt: skip
    elif part == 1:
        _gradient_part(
            gate_up_ptr, dy_ptr, row_code_ptr, row_scale_ptr, token_code_ptr, token_scale_ptr, T, padded_T, left,
            1, SIZE, POWER_OF_TWO, ON_GPU, BLOCK,
        )  # fmt: skip
    else:
        if SQUARE:
            y_scale_ptr += column_block.to(tl.int64) * (padded_T // BLOCK) + block
        else:
            y_scale_ptr += block.to(tl.int64) * SIZE + column
        y0_GC = _load_part(gate_up_ptr, dy_ptr, left, 2, 0, SIZE, ON_GPU, BLOCK)
        y1_GC = _load_part(gate_up_ptr, dy_ptr, left, 2, 1, SIZE, ON_GPU, BLOCK)
        y2_GC = _load_part(gate_up_ptr, dy_ptr, left, 2, 2, SIZE, ON_GPU, BLOCK)
        y3_GC = _load_part(gate_up_ptr, dy_ptr, left, 2, 3, SIZE, ON_GPU, BLOCK)
        store_tokens(
            y0_GC, y1_GC, y2_GC, y3_GC, tl.max(tile_magnitudes(y0_GC, y1_GC, y2_GC, y3_GC, ON_GPU), 0),
            y_code_ptr + column * padded_T + token, y_scale_ptr, padded_T, BLOCK,
            POWER_OF_TWO, SQUARE, ON_GPU, BLOCK,
        )  # fmt: skip


def silu_mul_backward_quantize_triton(
    gate_up_T2F: Tensor, dy_TF: Tensor, power_of_two: bool = False, square: bool = False
) -> tuple[BothWays, Quantized]:
    """The Triton launcher. Both contiguous, of one dtype, any T and F; one kernel if F is a multiple of 128."""
    tokens, size = dy_TF.shape
    if size % BLOCK:
        both = quantize_both_triton(silu_mul_backward_triton(gate_up_T2F, dy_TF), power_of_two)
        return both, quantize_tokens_triton(silu_mul_triton(gate_up_T2F), power_of_two, square)
    device = dy_TF.device
    row_codes, row_scale = empty_rows(tokens, 2 * size, device)
    token_codes, token_scale = empty_tokens(tokens, 2 * size, False, device)
    y_codes, y_scale = empty_tokens(tokens, size, square, device)
    if tokens:
        _silu_mul_backward_quantize_kernel[(PARTS * triton.cdiv(tokens, BLOCK) * (size // BLOCK),)](
            gate_up_T2F, dy_TF, row_codes, row_scale, token_codes, token_scale, y_codes, y_scale,
            tokens, token_codes.shape[1], SIZE=size, POWER_OF_TWO=power_of_two, SQUARE=square,
            ON_GPU=dy_TF.is_cuda, TOKEN_BLOCKS=TOKEN_BLOCKS, PARTS=PARTS, ADJACENT=PARTS_ADJACENT, BLOCK=BLOCK,
            num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip
    rows = Quantized(row_codes.view(E4M3), row_scale)
    return BothWays(rows, as_tokens(token_codes, token_scale, False)), as_tokens(y_codes, y_scale, square)


def silu_mul_backward_quantize_reference(
    gate_up_T2F: Tensor, dy_TF: Tensor, power_of_two: bool = False, square: bool = False
) -> tuple[BothWays, Quantized]:
    """The same in plain torch, from the references of its parts."""
    both = quantize_both_reference(silu_mul_backward_reference(gate_up_T2F, dy_TF), power_of_two)
    return both, quantize_tokens_reference(silu_mul_reference(gate_up_T2F), power_of_two, square)


def silu_mul_backward_quantize(
    gate_up_T2F: Tensor, dy_TF: Tensor, power_of_two: bool = False, *, square: bool = False
) -> tuple[BothWays, Quantized]:
    """(codes of gate_up's gradient in both orientations, codes of y = SiLU(gate) * up along tokens). `square` is for
    y."""
    tokens, size = dy_TF.shape
    assert gate_up_T2F.shape == (tokens, 2 * size), f"expected gate_up [T, 2F] and dy [T, F]: {gate_up_T2F.shape}"
    assert gate_up_T2F.is_contiguous() and dy_TF.is_contiguous(), "silu_mul_backward_quantize: not contiguous"
    assert gate_up_T2F.dtype == dy_TF.dtype and dy_TF.dtype in (torch.bfloat16, torch.float32), (
        f"gate_up is {gate_up_T2F.dtype}, dy is {dy_TF.dtype}"
    )
    run = silu_mul_backward_quantize_triton if dy_TF.is_cuda else silu_mul_backward_quantize_reference
    return run(gate_up_T2F, dy_TF, power_of_two, square)
