"""MXFP8 (docs/fp8.md §13): E4M3 codes with a scale for each 32 values along the sum, a power of two. The quantiser, and
the "mxfp8" backend in plain torch.

    y = x w^T    acc = fma(sum over 32 of x * w, scale_x * scale_w, acc)      float32, K ascending, one accumulator

Both operands of all three GEMMs have blocks of 1 x 32, so a tensor has other codes along each of its dimensions. The
sum over 32 is exact, as in emulated_gemm.py, and so is its product with the scales, unless it leaves float32's range.

The scale's exponent is that of `power_of_two` in quantize.py. NVIDIA's recipe (arXiv 2506.08027) rounds amax / 448 up,
so nothing saturates; it is the one that linears use. OCP's specification (MX v1.0, 6.3) takes floor(log2(amax)) - 8, so
values above 1.75 of the largest power of two saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from octetrl.fp8.emulated_gemm import exact_nt
from octetrl.fp8.format import E4M3, MX_BLOCK, encode_e4m3, round_to_e4m3
from octetrl.fp8.quantize import Quantized, check_finite, dequantize, quantize_in_rows


def quantize_mx_reference(x_MK: Tensor, rounding: Literal["up", "ocp"] = "up") -> Quantized:
    """[M, K] -> codes [M, K] E4M3, scale [M, ceil(K/32)] float32, powers of two. `rounding`: of the scale."""
    return quantize_in_rows(x_MK, rounding == "up" or "ocp", encode_e4m3, E4M3, MX_BLOCK)


def quantize_mx_values(x_MK: Tensor) -> Quantized:
    """As `quantize_mx_reference`, with the codes' values in float32."""
    return quantize_in_rows(x_MK, True, round_to_e4m3, torch.float32, MX_BLOCK)


def quantize_mx_weight(
    w_NK: Tensor, name: str, out: Quantized | None, check: bool, quantize: Callable[[Tensor], Quantized]
) -> Quantized:
    """`quantize` of a weight, into `out` if given. NonFiniteError as from `quantize_weight`."""
    if check or not w_NK.is_cuda:
        check_finite(w_NK, name)
    made = quantize(w_NK)
    if out is None:
        return made
    out.codes.copy_(made.codes)
    out.scale.copy_(made.scale)
    return out


def dequantize_mx(q: Quantized) -> Tensor:
    """[M, K] float32."""
    return dequantize(q, (1, MX_BLOCK))


def mx_nt(x: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    return exact_nt(x, w, MX_BLOCK, out_dtype)


def mx_backward_nt(x: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    """Of dequantised values, in float32."""
    return (dequantize_mx(x) @ dequantize_mx(w).t()).to(out_dtype)
