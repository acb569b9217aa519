"""Quantise a tensor [T, K] to E4M3 in blocks of 128 tokens: operand of the wgrad GEMM."""

from __future__ import annotations

from torch import Tensor

from octetrl.fp8.quantize import Quantized, quantize_tokens_reference


def quantize_tokens(x_TK: Tensor, power_of_two: bool = False) -> Quantized:
    """[T, K] -> codes [K, T'] E4M3, scale [K, T'/128] float32."""
    return quantize_tokens_reference(x_TK, power_of_two)
