"""Quantise an activation [M, K] to E4M3 in blocks of 1 x 128 along K: operand of the forward and dgrad GEMMs."""

from __future__ import annotations

from torch import Tensor

from octetrl.fp8.quantize import Quantized, quantize_activation_reference


def quantize_activation(x_MK: Tensor, power_of_two: bool = False) -> Quantized:
    """[M, K] -> codes [M, K] E4M3, scale [M, ceil(K/128)] float32."""
    return quantize_activation_reference(x_MK, power_of_two)
