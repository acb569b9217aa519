"""The MXFP8 product of tensor cores that take E8M0 scales (Blackwell): y[M, N] = x[M, K] w[N, K]^T.

    acc = acc + sum over 32 of x * w * 2^(scale_x + scale_w)        K ascending, one accumulator, no split

It is the product of all three GEMMs of a linear (docs/fp8.md §13), since each has codes along its own sum.
`tl.dot_scaled` multiplies a tile's codes and applies the scales. There is one size of tile for every M, so a row is
always added by the same instruction: with fewer than 128 rows Triton would convert the codes to BF16 first. What a
tensor core keeps inside a sum is not known: compiled for sm_100, it has never run.

Scales arrive as float32 (quantize_mx.py) and become E8M0 in registers, by a shift.

M rows, N columns, K depth of the GEMM; R rows of an operand's tile, B blocks of 32 in a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.fp8.backends import BACKENDS, Backend
from octetrl.fp8.format import MX_BLOCK
from octetrl.fp8.mxfp8 import mx_nt
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.fp8_gemm import addressable

TILE_M, TILE_N, TILE_K = 128, 128, 128  # tcgen05.mma's block_scale has at least 128 rows
_STAGES, _WARPS = 3, 4
CODES = tl.constexpr("e4m3")


@triton.jit
def _e8m0(scale_ptr, row_R, num_rows, first_block, num_blocks, row_stride, block_stride, BLOCKS: tl.constexpr):
    """[R, B] bytes of E8M0. Blocks behind the last one have zeros for codes, so their scale is 1."""
    block_B = first_block + tl.arange(0, BLOCKS)
    inside_RB = (row_R < num_rows)[:, None] & (block_B < num_blocks)[None, :]
    scale_ptrs = scale_ptr + row_R[:, None].to(tl.int64) * row_stride + block_B[None, :] * block_stride
    scale_RB = tl.load(scale_ptrs, mask=inside_RB, other=1.0)
    return (scale_RB.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "x_block_stride"])
def _mxfp8_gemm_kernel(
    x_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    num_rows,
    num_columns,
    num_blocks,
    x_row_stride,
    x_block_stride,
    w_row_stride,
    w_block_stride,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = TILE_K // BLOCK
    start_m, start_n = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    row_M, column_N = start_m + tl.arange(0, TILE_M), start_n + tl.arange(0, TILE_N)
    acc_MN = tl.zeros([TILE_M, TILE_N], tl.float32)
    for block in tl.range(0, num_blocks, BLOCKS, num_stages=STAGES):
        x_MK = x_desc.load([start_m, block * BLOCK])
        w_NK = w_desc.load([start_n, block * BLOCK])
        x_scale_MB = _e8m0(x_scale_ptr, row_M, num_rows, block, num_blocks, x_row_stride, x_block_stride, BLOCKS)
        w_scale_NB = _e8m0(w_scale_ptr, column_N, num_columns, block, num_blocks, w_row_stride, w_block_stride, BLOCKS)
        acc_MN = tl.dot_scaled(x_MK, x_scale_MB, CODES, w_NK.T, w_scale_NB, CODES, acc_MN)
    inside_MN = (row_M < num_rows)[:, None] & (column_N < num_columns)[None, :]
    y_ptrs = y_ptr + row_M[:, None].to(tl.int64) * num_columns + column_N[None, :]
    tl.store(y_ptrs, acc_MN.to(y_ptr.dtype.element_ty), mask=inside_MN)


def mxfp8_gemm_triton(x: Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The Triton launcher: contiguous codes, scales in any layout."""
    assert x.codes.is_contiguous() and w.codes.is_contiguous(), "mxfp8_gemm: codes must be contiguous"
    x, w = addressable(x, w)
    (m, k), n = x.codes.shape, w.codes.shape[0]
    y_MN = torch.empty(m, n, dtype=out_dtype, device=x.codes.device)
    if m == 0:
        return y_MN
    _mxfp8_gemm_kernel[(triton.cdiv(m, TILE_M), triton.cdiv(n, TILE_N))](
        TensorDescriptor(x.codes, [m, k], [k, 1], [TILE_M, TILE_K]),
        TensorDescriptor(w.codes, [n, k], [k, 1], [TILE_N, TILE_K]),
        x.scale, w.scale, y_MN, m, n, x.scale.shape[1], *x.scale.stride(), *w.scale.stride(),
        TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K, BLOCK=MX_BLOCK, STAGES=_STAGES, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return y_MN


def mxfp8_gemm(x: Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """y[M, N] in `out_dtype`. x and w from `quantize_mx`: codes [., K], scale [., ceil(K/32)]."""
    return (mxfp8_gemm_triton if x.codes.is_cuda else mxfp8_gemm_reference)(x, w, out_dtype)


def mxfp8_gemm_reference(x: Quantized, w: Quantized, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The exact emulation (fp8/mxfp8.py)."""
    return mx_nt(x, w, out_dtype)


BACKENDS["dot_scaled"] = Backend(nt=mxfp8_gemm, dgrad=mxfp8_gemm, wgrad=mxfp8_gemm, block=(1, MX_BLOCK))
