"""Quantise a weight [N, K] to E4M3 in blocks of 128 x 128, once per optimizer step."""

from __future__ import annotations

from torch import Tensor

from octetrl.fp8.quantize import Quantized, quantize_weight_reference


def quantize_weight(
    w_NK: Tensor, power_of_two: bool = False, *, name: str = "weight", out: Quantized | None = None
) -> Quantized:
    """[N, K] -> codes [N, K] E4M3, scale [ceil(N/128), ceil(K/128)] float32, into `out` where given."""
    quantized = quantize_weight_reference(w_NK, power_of_two, name)
    if out is None:
        return quantized
    out.codes.copy_(quantized.codes)
    out.scale.copy_(quantized.scale)
    return out
