"""How K and V become codes on the device, by the rules of fp8/quantize.py. `kv_store` and its fused forms use this.

MODE: 1 calibrated, 2 dynamic (both E4M3), 3 int8; see `attention_order.MODE_NUMBER`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octetrl.kernels.quantize.quantize_activation import held_inverse, magnitude_bits

NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bits behind the point


@triton.jit
def int8_scale(amax_bits):
    """(scale, inverse) of heads whose amax has these bits. Both are NaN if it is not finite."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.where(amax_bits == 0, 1.0, tl.div_rn(amax, 127.0))
    inverse = tl.minimum(tl.div_rn(127.0, amax), 3.4028234663852886e38)
    inverse = tl.where(amax_bits == 0, 1.0, inverse)
    bad = amax_bits >= 0x7F800000
    return tl.where(bad, float("nan"), scale), tl.where(bad, float("nan"), inverse)


@triton.jit
def int8_code(scaled):
    """The integer nearest to float32 `scaled`, ties to even, at most 127 in magnitude, as float32. NaN gives 0."""
    held = tl.minimum(tl.maximum(tl.where(scaled == scaled, scaled, 0.0), -127.0), 127.0)
    return (held + NEAREST) - NEAREST


@triton.jit
def quantize_heads(x_KD, scale_ptr, head_K, is_head_K, MODE: tl.constexpr):
    """Codes, scales and saturated counts of one token's heads. x is float32, zero past the head's end. E4M3 codes have
    their own dtype, integer codes are float32."""
    if MODE == 1:
        scale_K = tl.load(scale_ptr + head_K, mask=is_head_K, other=1.0)
        inverse_K = held_inverse(scale_K)
    elif MODE == 2:
        amax_K = tl.max(tl.abs(x_KD), 1)
        scale_K = tl.div_rn(amax_K, tl.full(amax_K.shape, 448.0, tl.float32))
        inverse_K = tl.div_rn(tl.full(amax_K.shape, 448.0, tl.float32), amax_K)
        inverse_K = tl.minimum(inverse_K, 3.4028234663852886e38)
        scale_K = tl.where(amax_K == 0.0, 1.0, scale_K)
        inverse_K = tl.where(amax_K == 0.0, 1.0, inverse_K)
        finite_K = tl.min((tl.abs(x_KD) < float("inf")).to(tl.int32), 1) == 1
        scale_K = tl.where(finite_K, scale_K, float("nan"))
        inverse_K = tl.where(finite_K, inverse_K, float("nan"))
    else:
        scale_K, inverse_K = int8_scale(tl.max(magnitude_bits(x_KD), 1))
    scaled_KD = x_KD * inverse_K[:, None]
    saturated_K = tl.sum((tl.abs(scaled_KD) <= 448.0).to(tl.int32) ^ 1, 1)
    if MODE == 3:
        codes_KD = int8_code(scaled_KD)
    else:
        codes_KD = tl.clamp(scaled_KD, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return codes_KD, scale_K, saturated_K
