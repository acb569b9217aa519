"""The "emulated" backend: block-scaled FP8 GEMMs in plain torch, for any device and meant for a CPU.

    acc = fma(sum over 128 of x * w, scale_x * scale_w, acc)      float32, K ascending, one accumulator

A product of two E4M3 values is a multiple of 2^-18 below 2^18. The sum of 128 of them therefore fits float64's 53 bits
exactly, in any order of summation. The forward rounds this sum to float32 and computes the fma through float64. A row's
bits depend on the row itself and on nothing else. float64 runs at half the speed of float32.

The backward gives no such promise. It multiplies dequantised values in float32.

M rows, N columns, K depth of the GEMM; B blocks of 128 along K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.fp8.format import BLOCK, decode_e4m3
from octetrl.fp8.quantize import Quantized, dequantize_activation, dequantize_tokens, dequantize_weight, row_chunks


def emulated_nt(x: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    scale_NB = w.scale.repeat_interleave(BLOCK, 0)[: w.codes.shape[0]]
    return exact_nt(x, Quantized(w.codes, scale_NB), BLOCK, out_dtype)


def exact_nt(x: Quantized, w: Quantized, block: int, out_dtype: torch.dtype) -> Tensor:
    """w: a row of scales for each row of codes."""
    values_NK = decode_e4m3(w.codes, torch.float64)
    values_MK = decode_e4m3(x.codes)
    out_MN = torch.empty(values_MK.shape[0], values_NK.shape[0], dtype=out_dtype, device=values_MK.device)
    for rows in row_chunks(out_MN.shape[0], out_MN.shape[1], 1):
        out_MN[rows] = _emulated_rows(values_MK[rows], x.scale[rows], values_NK, w.scale, block)
    return out_MN


def _emulated_rows(values_MK: Tensor, scale_MB: Tensor, values_NK: Tensor, scale_NB: Tensor, size: int) -> Tensor:
    """acc[M, N] in float32: exact sums over `size`, then one fma for each block, K ascending."""
    acc_MN = torch.empty(0)
    for block in range(scale_NB.shape[1]):
        depth = slice(block * size, (block + 1) * size)
        partial_MN = (values_MK[:, depth].double() @ values_NK[:, depth].t()).float()
        scale_MN = scale_MB[:, block, None] * scale_NB[:, block]
        if block == 0:
            acc_MN = partial_MN.mul_(scale_MN)  # fma with an accumulator of zero equals a rounded product
        else:
            acc_MN = torch.addcmul(acc_MN.double(), partial_MN.double(), scale_MN.double()).float()
    return acc_MN


def emulated_dgrad(dy: Quantized, w_transposed: Quantized, out_dtype: torch.dtype) -> Tensor:
    return (dequantize_activation(dy) @ dequantize_weight(w_transposed).t()).to(out_dtype)


def emulated_wgrad(dy_tokens: Quantized, x_tokens: Quantized, out_dtype: torch.dtype) -> Tensor:
    return (dequantize_tokens(dy_tokens).t() @ dequantize_tokens(x_tokens)).to(out_dtype)
