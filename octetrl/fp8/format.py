"""The E4M3 format: 1 sign bit, 4 exponent bits, 3 mantissa bits. The largest finite value is 448. There is no infinity.
NaN is 0x7F or 0xFF.

A code is one byte on a GPU. Without FP8 hardware, bytes are slow: torch's CPU cast from float8 takes 4 ns an element,
sixty times an ordinary elementwise op. The emulated path therefore keeps the *value* of a code in float32.
`round_to_e4m3` computes that value with float32 arithmetic, and `decode_e4m3` reads it from bytes. The numbers are the
same in both forms.

How rounding by arithmetic works: E4M3 values of magnitude 2^e are 2^(e-3) apart (2^-9 below the smallest normal value,
2^-6). Adding 1.5 * 2^(e+20) moves that spacing to float32's last bit, so the addition itself rounds to nearest even.
Subtracting the same number is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
INT8_MAX = 127.0  # of an integer code; -128 is not used
BLOCK = 128
MX_BLOCK = 32  # elements along K that share a scale in MXFP8
NAN_CODE = 0x7F  # the one NaN code our quantisers write

_EXPONENT_BITS = 0x7F800000
_SMALLEST_NORMAL_BITS = 0x3C800000  # 2^-6 as float32
_MAGIC_BITS = (20 << 23) | 0x400000  # times 2^20, plus one half: 2^e becomes 1.5 * 2^(e+20)


def round_to_e4m3(x: Tensor) -> Tensor:
    """The E4M3 value nearest to each element (ties to even), as float32. NaN stays NaN.

    `x` is float32 with |x| <= 448 (the caller clamps); the sign of a zero is not kept.
    """
    magic = x.view(torch.int32).bitwise_and(_EXPONENT_BITS)
    magic.clamp_min_(_SMALLEST_NORMAL_BITS).add_(_MAGIC_BITS)
    magic_float = magic.view(torch.float32)
    return (x + magic_float).sub_(magic_float)


def encode_e4m3(x: Tensor) -> Tensor:
    """E4M3 bytes of float32 `x`, |x| <= 448, rounded to nearest even; NaN becomes the one code 0x7F."""
    codes = x.to(E4M3)
    codes.view(torch.uint8).masked_fill_(x.isnan(), NAN_CODE)
    return codes


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of E4M3 bytes; int8 codes and values that are already decoded only change dtype.

    On a CPU it uses a table of the 256 values, because torch's own cast is six times slower.
    """
    if codes.dtype != E4M3 or codes.device.type != "cpu":
        return codes.to(dtype)
    index = codes.contiguous().view(torch.uint8).view(-1).int()
    return _E4M3_VALUES.to(dtype).index_select(0, index).view(codes.shape)


def is_code(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype holds codes of one byte, whose values need scales."""
    return dtype in (E4M3, torch.int8)


_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float64)
