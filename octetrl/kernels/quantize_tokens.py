"""Quantise a tensor [T, K] to E4M3 in blocks of 128 tokens: operand of the wgrad GEMM, whose contraction is
T.

One program takes 128 tokens by 64 columns, one amax a column, and writes the codes transposed: tokens are
contiguous in the result, as both operands of `scaled_mm` want their contraction. T is padded with zeros to a
multiple of 128 (zeros add nothing to a sum over tokens). The rule is that of `fp8/quantize.py`, to the byte.

Layout: x [T, K] with K contiguous; codes [K, T']; scale stored [T'/128, K] and returned transposed, strides
(1, K).

Legend: T tokens, T' padded tokens, K columns, C columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_tokens_reference
from octetrl.kernels.quantize_activation import block_scale, e4m3_byte, magnitude_bits

_COLUMNS = 64


@triton.jit
def _quantize_tokens_kernel(
    x_ptr, code_ptr, scale_ptr, T, K, row_stride, padded_T, POWER_OF_TWO: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    token_T = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column_C = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside_TC = (token_T < T)[:, None] & (column_C < K)[None, :]
    x_TC = tl.load(x_ptr + token_T[:, None] * row_stride + column_C[None, :], mask=inside_TC, other=0.0)
    x_TC = x_TC.to(tl.bfloat16).to(tl.float32)
    scale_C, inverse_C = block_scale(tl.max(magnitude_bits(x_TC), 0), POWER_OF_TWO)
    code_CT = tl.trans(e4m3_byte(x_TC * inverse_C[None, :]))
    tl.store(code_ptr + column_C[:, None] * padded_T + token_T[None, :], code_CT, mask=(column_C < K)[:, None])
    tl.store(scale_ptr + block.to(tl.int64) * K + column_C, scale_C, mask=column_C < K)


def quantize_tokens_triton(x_TK: Tensor, power_of_two: bool = False) -> Quantized:
    """The Triton launcher: x_TK BF16 or float32, any T and K."""
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    tokens, columns = x_TK.shape
    blocks = triton.cdiv(tokens, BLOCK)
    codes = torch.empty(columns, blocks * BLOCK, dtype=torch.uint8, device=x_TK.device)
    scale = torch.empty(blocks, columns, dtype=torch.float32, device=x_TK.device)
    if tokens:
        _quantize_tokens_kernel[(blocks, triton.cdiv(columns, _COLUMNS))](
            x_TK, codes, scale, tokens, columns, x_TK.stride(0), blocks * BLOCK,
            POWER_OF_TWO=power_of_two, COLUMNS=_COLUMNS, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return Quantized(codes.view(E4M3), scale.t())


def quantize_tokens(x_TK: Tensor, power_of_two: bool = False) -> Quantized:
    """[T, K] -> codes [K, T'] E4M3, scale [K, T'/128] float32 (on CUDA with strides (1, K))."""
    assert x_TK.dim() == 2, f"want [T, K], got {tuple(x_TK.shape)}"
    quantize = quantize_tokens_triton if x_TK.is_cuda else quantize_tokens_reference
    return quantize(x_TK, power_of_two)
