"""The quantised rows of experts from those of tokens: codes and scales in one kernel.

    codes[p] = codes[token[p]],    scale[p] = scale[token[p]]

Bytes are copied, so no bit depends on the launch. Scales are stored block by block, as the grouped GEMM reads them: a
program takes some rows, so that their scales of one block are neighbours.

T tokens, P rows, K columns, B blocks of 128 columns, R rows of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_activation import empty_rows

ROWS = 4


@triton.jit
def copy_rows(
    code_ptr, scale_ptr, token_ptr, out_code_ptr, out_scale_ptr, row_R, inside_R, scale_row, scale_block, out_block,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Rows `row_R`, each from its token."""
    token_R = tl.load(token_ptr + row_R, mask=inside_R, other=0)
    column_K, block_B = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_B)
    inside_RK = inside_R[:, None] & (column_K < COLUMNS)[None, :]
    code_RK = tl.load(code_ptr + token_R[:, None] * COLUMNS + column_K[None, :], mask=inside_RK)
    tl.store(out_code_ptr + row_R[:, None] * COLUMNS + column_K[None, :], code_RK, mask=inside_RK)
    inside_RB = inside_R[:, None] & (block_B < BLOCKS)[None, :]
    scale_RB = tl.load(scale_ptr + token_R[:, None] * scale_row + block_B[None, :] * scale_block, mask=inside_RB)
    tl.store(out_scale_ptr + row_R[:, None] + block_B[None, :] * out_block, scale_RB, mask=inside_RB)


@triton.jit(do_not_specialize=["num_rows"])
def _gather_codes_kernel(
    code_ptr, scale_ptr, token_ptr, out_code_ptr, out_scale_ptr, num_rows, scale_row, scale_block, out_block,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    copy_rows(
        code_ptr, scale_ptr, token_ptr, out_code_ptr, out_scale_ptr, row_R, row_R < num_rows, scale_row, scale_block,
        out_block, COLUMNS, BLOCKS, BLOCK_K, BLOCK_B,
    )  # fmt: skip


def gather_codes_triton(x: Quantized, token_P: Tensor) -> Quantized:
    """The launcher."""
    rows, columns, blocks = len(token_P), x.codes.shape[1], x.scale.shape[1]
    assert x.codes.is_contiguous() and token_P.is_contiguous(), "gather_codes: codes and tokens must be contiguous"
    codes, scale = empty_rows(rows, columns, x.codes.device)
    options = {"enable_fp_fusion": False} if x.codes.is_cuda else {}
    if rows:
        _gather_codes_kernel[(triton.cdiv(rows, ROWS),)](
            x.codes.view(torch.uint8), x.scale, token_P, codes, scale, rows, *x.scale.stride(), scale.stride(1),
            COLUMNS=columns, BLOCKS=blocks, ROWS=ROWS, BLOCK_K=triton.next_power_of_2(columns),
            BLOCK_B=triton.next_power_of_2(blocks), **options,
        )  # fmt: skip
    return Quantized(codes.view(E4M3), scale)


def gather_codes_reference(x: Quantized, token_P: Tensor) -> Quantized:
    """In plain torch: the same bytes. Of the emulation's values too."""
    codes, scale = x.codes, x.scale.t().index_select(1, token_P).t()  # scales of a block stay side by side
    if codes.dtype != E4M3:
        return Quantized(codes.index_select(0, token_P), scale)
    return Quantized(codes.view(torch.uint8).index_select(0, token_P).view(E4M3), scale)


def gather_codes(x: Quantized, token_P: Tensor) -> Quantized:
    """codes [P, K] and scale [P, B], with strides (1, room) of the scale, of x's codes [T, K] and scale [T, B].
    token_P: int64."""
    return (gather_codes_triton if x.codes.is_cuda else gather_codes_reference)(x, token_P)
