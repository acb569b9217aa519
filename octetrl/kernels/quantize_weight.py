"""Quantise a weight [N, K] to E4M3 in blocks of 128 x 128, once per optimizer step.

One program takes one block. The result goes into given codes and scale where there are any: those are the
buffers the engine reads, so publishing a weight is this one kernel and no copy. The rule is that of
`fp8/quantize.py`, to the byte. A non-finite weight is an error that names it: the kernel marks its block's
scale NaN, and one read of the small scale tensor afterwards looks for that mark.

Layout: w [N, K] with K contiguous; codes [N, K] and scale [ceil(N/128), ceil(K/128)] contiguous.

Legend: N rows, K columns, R and C the 128 rows and columns of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, check_finite, quantize_weight_reference
from octetrl.kernels.quantize_activation import block_scale, e4m3_byte, magnitude_bits


@triton.jit
def _quantize_weight_kernel(
    w_ptr, code_ptr, scale_ptr, N, K, row_stride, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr
):
    row_block, column_block = tl.program_id(0), tl.program_id(1)
    row_R = row_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column_C = column_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside_RC = (row_R < N)[:, None] & (column_C < K)[None, :]
    w_RC = tl.load(w_ptr + row_R[:, None] * row_stride + column_C[None, :], mask=inside_RC, other=0.0)
    w_RC = w_RC.to(tl.bfloat16).to(tl.float32)
    scale, inverse = block_scale(tl.max(tl.max(magnitude_bits(w_RC), 1), 0), POWER_OF_TWO)
    tl.store(code_ptr + row_R[:, None] * K + column_C[None, :], e4m3_byte(w_RC * inverse), mask=inside_RC)
    tl.store(scale_ptr + row_block * tl.num_programs(1) + column_block, scale)


def quantize_weight_triton(w_NK: Tensor, power_of_two: bool, name: str, out: Quantized) -> Quantized:
    """The Triton launcher: w_NK BF16 or float32, any N and K; writes `out`. Reads the host once."""
    if w_NK.stride(1) != 1:
        w_NK = w_NK.contiguous()
    assert out.codes.is_contiguous() and out.scale.is_contiguous(), "codes and scale must be contiguous"
    rows, columns = w_NK.shape
    _quantize_weight_kernel[(triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK))](
        w_NK, out.codes.view(torch.uint8), out.scale, rows, columns, w_NK.stride(0),
        POWER_OF_TWO=power_of_two, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    if bool(out.scale.isnan().any()):
        check_finite(w_NK, name)
    return out


def quantize_weight(
    w_NK: Tensor, power_of_two: bool = False, *, name: str = "weight", out: Quantized | None = None
) -> Quantized:
    """[N, K] -> codes [N, K] E4M3, scale [ceil(N/128), ceil(K/128)] float32, into `out` where given.

    Raises ValueError naming the tensor when it holds a non-finite value; a CPU's `out` is then untouched, a
    GPU's is not fit for use.
    """
    assert w_NK.dim() == 2, f"want [N, K], got {tuple(w_NK.shape)}"
    if w_NK.is_cuda:
        return quantize_weight_triton(w_NK, power_of_two, name, _empty_like(w_NK) if out is None else out)
    quantized = quantize_weight_reference(w_NK, power_of_two, name)
    if out is None:
        return quantized
    out.codes.copy_(quantized.codes)
    out.scale.copy_(quantized.scale)
    return out


def _empty_like(w_NK: Tensor) -> Quantized:
    blocks = [triton.cdiv(size, BLOCK) for size in w_NK.shape]
    return Quantized(
        torch.empty(w_NK.shape, dtype=E4M3, device=w_NK.device),
        torch.empty(blocks, dtype=torch.float32, device=w_NK.device),
    )
