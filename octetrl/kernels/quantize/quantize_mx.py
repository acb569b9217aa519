"""Quantise a matrix [M, K] to MXFP8, in blocks of 1 x 32 along K: each operand of the three GEMMs (docs/fp8.md §13).

The rule is `block_scale` of quantize_activation.py with powers of two, and the amax is a maximum of bit patterns, as
there. One program takes 32 rows of four blocks. Any strides of x are read, so `quantize_mx(x.t())` gives the codes
along the other dimension and writes them contiguous. Codes and scales depend on their own block alone.

Scales are float32, as those of all codes here: E8M0's byte is the exponent field of such a power of two, and 255, its
NaN, is that of float32's. The bytes equal the reference's.

M rows, K columns, R rows of a tile, C columns of a tile, B blocks of a tile, V values of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3, MX_BLOCK
from octetrl.fp8.mxfp8 import quantize_mx_reference
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_activation import block_scale, e4m3_byte, magnitude_bits

_ROWS, _BLOCKS = 32, 4


@triton.jit(do_not_specialize=["M"])
def _quantize_mx_kernel(
    x_ptr, code_ptr, scale_ptr, M, K, row_stride, column_stride,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_C = tl.program_id(1).to(tl.int64) * (BLOCKS * BLOCK) + tl.arange(0, BLOCKS * BLOCK)
    inside_RC = (row_R < M)[:, None] & (column_C < K)[None, :]
    x_RC = tl.load(x_ptr + row_R[:, None] * row_stride + column_C[None, :] * column_stride, mask=inside_RC, other=0.0)
    x_RBV = tl.reshape(x_RC.to(tl.bfloat16).to(tl.float32), [ROWS, BLOCKS, BLOCK])
    scale_RB, inverse_RB = block_scale(tl.max(magnitude_bits(x_RBV), 2), True)
    code_RC = tl.reshape(e4m3_byte(x_RBV * inverse_RB[:, :, None]), [ROWS, BLOCKS * BLOCK])
    tl.store(code_ptr + row_R[:, None] * K + column_C[None, :], code_RC, mask=inside_RC)
    count = tl.cdiv(K, BLOCK)
    block_B = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside_RB = (row_R < M)[:, None] & (block_B < count)[None, :]
    tl.store(scale_ptr + row_R[:, None] * count + block_B[None, :], scale_RB, mask=inside_RB)


def quantize_mx_triton(x_MK: Tensor) -> Quantized:
    """The Triton launcher: x_MK BF16 or float32, any M, K and strides."""
    rows, columns = x_MK.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=x_MK.device)
    scale = torch.empty(rows, triton.cdiv(columns, MX_BLOCK), device=x_MK.device)
    if rows:
        _quantize_mx_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(columns, _BLOCKS * MX_BLOCK))](
            x_MK, codes, scale, rows, columns, x_MK.stride(0), x_MK.stride(1),
            ROWS=_ROWS, BLOCKS=_BLOCKS, BLOCK=MX_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return Quantized(codes.view(E4M3), scale)


def quantize_mx(x_MK: Tensor) -> Quantized:
    """[M, K] -> codes [M, K] E4M3, scale [M, ceil(K/32)] float32, powers of two."""
    assert x_MK.dim() == 2, f"expected [M, K], got {tuple(x_MK.shape)}"
    return quantize_mx_triton(x_MK) if x_MK.is_cuda else quantize_mx_reference(x_MK)
