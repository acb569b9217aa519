"""Ways to store K or V, each as two functions: look at calibration values, then quantise and dequantise.

A `Codec` receives the calibration texts' values of one layer, each [T, K, D], and returns a function that maps the
values of one text to what would be read back. E4M3 uses the package's quantisers, so `e4m3_head` and `e4m3_token` give
the values of `fp8.kv_cache: calibrated` and `dynamic`.

    e4m3_head(margin)        one scale a KV head: margin x the largest calibration magnitude / 448
    e4m3_group(size)         one scale for each `size` channels of a head, calibrated
    e4m3_token               one scale a token and KV head
    int8_token(group)        the same in 8-bit integers, scale = amax / 127; `group` channels a scale
    int8_channel(margin)     8-bit integers, one calibrated scale a channel
    centred(codec)           without a constant for each channel, the calibration's mean, in BF16
    first_exact(codec, n)    the first n tokens of a text in BF16, and not in the calibration

Constants and scales of channels cost attention nothing in its inner loop: a scale of K's channel multiplies q, one of
V's channel multiplies the output, a constant in K adds the same number to all scores of a query, and one in V adds
itself to the output, because the probabilities sum to 1.

T tokens, K kv heads, D head size, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.fp8.format import E4M3_MAX, decode_e4m3, round_to_e4m3
from octetrl.fp8.mxfp8 import dequantize_mx, quantize_mx_reference
from octetrl.fp8.quantize import quantize_kv_per_head, quantize_kv_per_token, scale_and_inverse

Values = Callable[[Tensor], Tensor]
Codec = Callable[[Sequence[Tensor]], Values]
INT8_MAX = 127.0
SMALLEST_NORMAL = 2.0**-6  # of E4M3
E2M1_MAX, FP4_BLOCK = 6.0, 16


def bf16(_calibration: Sequence[Tensor]) -> Values:
    return _rounded


def e4m3_head(margin: float = 1.05) -> Codec:
    return lambda calibration: _calibrated(calibration, margin, groups=1)


def e4m3_group(size: int, margin: float = 1.05) -> Codec:
    return lambda calibration: _calibrated(calibration, margin, groups=calibration[0].shape[2] // size)


def _calibrated(calibration: Sequence[Tensor], margin: float, groups: int) -> Values:
    scale_G = head_scales([_grouped(x_TKD, groups) for x_TKD in calibration], margin)

    def values(x_TKD: Tensor) -> Tensor:
        codes, _ = quantize_kv_per_head(_grouped(x_TKD, groups), scale_G)
        return (decode_e4m3(codes).to(x_TKD.dtype) * scale_G[None, :, None]).view(x_TKD.shape)

    return values


def head_scales(calibration: Sequence[Tensor], margin: float = 1.05) -> Tensor:
    """A calibrated cache's scales, float32 [K]."""
    amax_K = torch.stack([_rounded(x_TKD).abs().amax((0, 2)) for x_TKD in calibration]).amax(0).float()
    scale_K = amax_K * margin / torch.full_like(amax_K, E4M3_MAX)
    return scale_K.masked_fill(amax_K == 0, 1.0)


def e4m3_token(_calibration: Sequence[Tensor]) -> Values:
    def values(x_TKD: Tensor) -> Tensor:
        codes, scale_TK = quantize_kv_per_token(x_TKD)
        return decode_e4m3(codes).to(x_TKD.dtype) * scale_TK[:, :, None]

    return values


def int8_token(group: int | None = None) -> Codec:
    def fit(calibration: Sequence[Tensor]) -> Values:
        groups = 1 if group is None else calibration[0].shape[2] // group

        def values(x_TKD: Tensor) -> Tensor:
            x = _grouped(_rounded(x_TKD), groups)
            return _int8(x, x.abs().amax(2, keepdim=True) / INT8_MAX).view(x_TKD.shape)

        return values

    return fit


def int8_channel(margin: float = 1.05) -> Codec:
    def fit(calibration: Sequence[Tensor]) -> Values:
        amax_KD = torch.stack([_rounded(x_TKD).abs().amax(0) for x_TKD in calibration]).amax(0)
        return lambda x_TKD: _int8(_rounded(x_TKD), (amax_KD * margin / INT8_MAX)[None])

    return fit


def int8_head(margin: float = 1.05) -> Codec:
    def fit(calibration: Sequence[Tensor]) -> Values:
        scale_K = head_scales(calibration, margin) * (E4M3_MAX / INT8_MAX)
        return lambda x_TKD: _int8(_rounded(x_TKD), scale_K[None, :, None].to(x_TKD.dtype))

    return fit


def centred(codec: Codec) -> Codec:
    def fit(calibration: Sequence[Tensor]) -> Values:
        constant_KD = _rounded(torch.cat(list(calibration)).mean(0))
        values = codec([_rounded(x_TKD) - constant_KD for x_TKD in calibration])
        return lambda x_TKD: values(_rounded(x_TKD) - constant_KD) + constant_KD

    return fit


def first_exact(codec: Codec, tokens: int) -> Codec:
    def fit(calibration: Sequence[Tensor]) -> Values:
        values = codec([x_TKD[tokens:] for x_TKD in calibration])
        return lambda x_TKD: torch.cat((_rounded(x_TKD[:tokens]), values(x_TKD[tokens:])))

    return fit


def in_blocks(x: Tensor, rows: int, columns: int, integers: bool = False) -> Tensor:
    """A matrix after E4M3, or 8-bit integers, with a scale for each block of `rows` x `columns`."""
    height, width = x.shape
    padded = F.pad(_rounded(x), (0, -width % columns, 0, -height % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    if integers:
        values = _int8(blocks, amax / INT8_MAX)
    else:
        scale, inverse = scale_and_inverse(amax.float())
        values = round_to_e4m3((blocks.float() * inverse).clamp(-E4M3_MAX, E4M3_MAX)) * scale
    return values.reshape(padded.shape)[:height, :width].to(x.dtype)


def mxfp8(x_MK: Tensor, rounding: Literal["up", "ocp"] = "up") -> Tensor:
    """A matrix after MXFP8 along its rows (octetrl/fp8/mxfp8.py)."""
    return dequantize_mx(quantize_mx_reference(x_MK, rounding)).to(x_MK.dtype)


def nvfp4(x_MK: Tensor) -> Tensor:
    """A matrix after NVFP4 along its rows: E2M1 in blocks of 16, each with an E4M3 scale, and one float32 for all.

        tensor = amax of all / (6 * 448)     scale = e4m3(amax of the block / 6 / tensor)     x ~ e2m1 * scale * tensor

    Values are rounded to nearest, ties to even, and clamped to 6. A block whose scale rounds to 0 becomes 0.
    """
    rows, columns = x_MK.shape
    x = F.pad(_rounded(x_MK).float(), (0, -columns % FP4_BLOCK))
    blocks = x.view(rows, -1, FP4_BLOCK)
    tensor = x.abs().max() / (E2M1_MAX * E4M3_MAX)
    scale = blocks.abs().amax(2, keepdim=True) / E2M1_MAX / tensor.clamp_min(torch.finfo(torch.float32).tiny)
    step = round_to_e4m3(scale.clamp_max(E4M3_MAX)) * tensor
    scaled = torch.where(step > 0, blocks / step, 0.0).clamp(-E2M1_MAX, E2M1_MAX)
    return (round_to_e2m1(scaled) * step).view(x.shape)[:, :columns].to(x_MK.dtype)


def round_to_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, of two as near the one with an even mantissa."""
    spacing = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (x / spacing).round() * spacing  # torch rounds ties to even


def below_normal(x_TKD: Tensor, scale_K: Tensor) -> Tensor:
    """Whether a value's code is below E4M3's smallest normal number, where fewer mantissa bits are left."""
    return x_TKD.abs() < scale_K.to(x_TKD.dtype)[None, :, None] * SMALLEST_NORMAL


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    scale = scale.masked_fill(scale == 0, 1.0)
    return (x / scale).round().clamp(-INT8_MAX, INT8_MAX) * scale


def _grouped(x_TKD: Tensor, groups: int) -> Tensor:
    return x_TKD.reshape(x_TKD.shape[0], x_TKD.shape[1] * groups, -1)


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)
