"""MXFP4 read exactly: E2M1 codes with a power of two for every 32 values, as gpt-oss is published.

    value = code * 2^(scale - 127)        code: sign, two bits of exponent, one of mantissa; 0 to 6

A value has two significant bits, so BF16 holds it exactly wherever its exponent does. A scale of 255 is NaN. FP8 holds
blocks of these values exactly too if its scales are powers of two and exponents within a block differ by 14 at most.

Layout: a byte has two codes, the first in its low half. `blocks` [..., B, 16], `scales` [..., B], both uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS, NOT_A_NUMBER = 127, 255
PIECE_BLOCKS = 1 << 21  # that are decoded at a time: 128 MB of values


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """BF16 [..., 32 B]. A value that BF16 cannot hold is infinite."""
    assert blocks.shape == (*scales.shape, 16), f"MXFP4 blocks {tuple(blocks.shape)} with scales {tuple(scales.shape)}"
    assert blocks.dtype == scales.dtype == torch.uint8, f"MXFP4 of {blocks.dtype} and {scales.dtype}"
    code = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([code[byte % 16], code[byte // 16]], 1).view(torch.int32).flatten()  # both values of a byte
    power = torch.ldexp(torch.ones(256, dtype=torch.float64), byte - BIAS).to(torch.bfloat16)
    power[NOT_A_NUMBER] = torch.nan
    values = torch.empty(scales.numel(), 32, dtype=torch.bfloat16)
    pieces = (blocks.reshape(-1, 16), scales.reshape(-1), values)
    for block_B, scale_B, value_B in zip(*(x.split(PIECE_BLOCKS) for x in pieces), strict=True):
        torch.index_select(pairs, 0, block_B.flatten().int(), out=value_B.view(torch.int32).view(-1))
        value_B.mul_(power[scale_B.int()][:, None])
    return values.view(*scales.shape[:-1], -1)
