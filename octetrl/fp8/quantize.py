"""The quantisers in plain torch (docs/fp8.md §1, §2). They define the bytes of every kernel, and a CPU runs them.

    scale = amax / 448      inverse = 448 / amax      code = e4m3(clamp(x * inverse, ±448))      x ~ code * scale

    activation [M, K]   1 x 128 along K      scale [M, ceil(K/128)]            operand of forward and dgrad
    weight     [N, K]   128 x 128            scale [ceil(N/128), ceil(K/128)]  once per optimizer step
    tokens     [T, K]   128 x 1 along T      codes [K, T'], scale [K, T'/128]  operand of wgrad, which sums over T
               `square`: 128 x 128           codes [K, T'], scale [ceil(K/128), T'/128], a weight's layout
    KV         [T, K, D]  a scale per head (calibrated) or per token and head (dynamic)
               `int8`     a scale per token and head, amax / 127, and integer codes

The amax is taken in float32 over BF16-rounded values. A BF16 tensor and the float32 tensor that it was rounded from
therefore have the same codes. An incomplete last block counts as padded with zeros. Both divisions are IEEE divisions
by a *tensor*. torch would turn `448.0 / amax`, and on CUDA also `amax / 448.0`, into a multiplication by a reciprocal,
whose last bit sometimes differs.

Special cases, the same in the kernels:
- A block of zeros has scale 1 and codes 0. A negative zero keeps its sign: byte 0x80.
- An amax below 448 / FLT_MAX has no finite inverse. The inverse is then FLT_MAX, because 0 * inf would give NaN. All
  values of such a block are below 1.4e-36 and shrink towards zero.
- A calibrated KV scale below 1 / FLT_MAX has no finite inverse either. Its inverse is FLT_MAX too.
- `power_of_two` rounds the scale up to 2^ceil(log2(amax/448)), by its bits. The inverse is then exact. The scale is at
  most 2^119, so every code has a finite value. An amax above 448 * 2^119 = 2.98e38 saturates. "ocp" is the rule
  of OCP's MX specification, 2^(floor(log2(amax)) - 8): a mantissa above 1.75 saturates. Both are at least 2^-126.
- A non-finite activation poisons its block: the scale and every code become NaN (0x7F). It can therefore never turn
  into a finite number, and the host need not read anything. `non_finite_count` counts such values. In a weight they are
  an error.

`*_values` variants return the same codes as float32 *values* instead of bytes; see `fp8/format.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3, E4M3_MAX, INT8_MAX, decode_e4m3, encode_e4m3, round_to_e4m3
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.shapes.blocks import KVMode

_FLOAT32_MAX = torch.finfo(torch.float32).max
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
_LARGEST_POWER_BITS = 0x7B000000  # 2^119: 448 * 2^119 is finite, 256 * 2^120 is not
_SMALLEST_POWER_BITS = 0x00800000  # 2^-126
_OCP_SHIFT = 8 << 23  # E4M3's largest power of two is 2^8
_CHUNK_ELEMENTS = 1 << 18


PowerOfTwo = bool | Literal["ocp"]  # of scales: not, rounded up, or as OCP's specification rounds


class Quantized(NamedTuple):
    """Codes (E4M3 bytes, or their values in a float dtype) and float32 scales: `value ~ code * scale`."""

    codes: Tensor
    scale: Tensor


# ---------------------------------------------------------------- one rule for every block


def scale_and_inverse(
    amax: Tensor, power_of_two: PowerOfTwo = False, *, largest: float = E4M3_MAX
) -> tuple[Tensor, Tensor]:
    """Scale and inverse of blocks with these float32 amax values, which become the code `largest`. Both are NaN if amax
    is not finite."""
    largest_code = torch.full_like(amax, largest)
    scale = torch.div(amax, largest_code)
    if power_of_two:
        if power_of_two == "ocp":
            bits = (amax.view(torch.int32) & _EXPONENT_BITS).sub_(_OCP_SHIFT).clamp_min_(_SMALLEST_POWER_BITS)
        else:
            bits = (scale.view(torch.int32) + _MANTISSA_BITS) & _EXPONENT_BITS
        scale = bits.clamp_max_(_LARGEST_POWER_BITS).view(torch.float32)
        inverse = torch.div(torch.ones_like(scale), scale)
    else:
        inverse = torch.div(largest_code, amax)
    zero = amax == 0
    scale = scale.masked_fill(zero, 1.0)
    inverse = inverse.masked_fill(zero, 1.0).clamp_max(_FLOAT32_MAX)
    bad = ~amax.isfinite()
    return scale.masked_fill_(bad, torch.nan), inverse.masked_fill_(bad, torch.nan)


def inverse_of(scale: Tensor) -> Tensor:
    """1 / scale, at most FLT_MAX, as for a block's inverse. NaN stays NaN."""
    return torch.div(torch.ones_like(scale), scale).clamp_max_(_FLOAT32_MAX)


def row_chunks(rows: int, columns: int, multiple: int) -> Iterator[slice]:
    """Slices of rows, each a multiple of `multiple`. A pass over one slice stays in a CPU's cache."""
    step = max(1, _CHUNK_ELEMENTS // (columns * multiple)) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _bf16_rounded(x: Tensor) -> Tensor:
    """A new float32 tensor of `x` rounded to BF16."""
    return x.float() if x.dtype == torch.bfloat16 else x.to(torch.bfloat16).float()


Rounding = Callable[[Tensor], Tensor]  # scaled float32 -> E4M3 bytes (encode_e4m3) or their values (round_to_e4m3)


def _quantize_blocks(
    blocks: Tensor, dim: tuple[int, ...], power_of_two: PowerOfTwo, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """Codes in `blocks`' shape, and the scale without dimension `dim`. Overwrites `blocks`."""
    scale, inverse = scale_and_inverse(blocks.abs().amax(dim, keepdim=True), power_of_two)
    return rounding(blocks.mul_(inverse).clamp_(-E4M3_MAX, E4M3_MAX)), scale.squeeze(dim)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """A float32 copy of BF16-rounded `x`, padded with zeros to multiples of `rows` and `columns`."""
    extra_rows, extra_columns = -x.shape[0] % rows, -x.shape[1] % columns
    if extra_rows or extra_columns:
        return F.pad(_bf16_rounded(x), (0, extra_columns, 0, extra_rows))
    return _bf16_rounded(x).contiguous()


# ---------------------------------------------------------------- activation: 1 x 128 along K


def quantize_activation_reference(x_MK: Tensor, power_of_two: bool = False) -> Quantized:
    """[M, K] -> codes [M, K] E4M3, scale [M, ceil(K/128)] float32."""
    return quantize_in_rows(x_MK, power_of_two, encode_e4m3, E4M3)


def quantize_activation_values(x_MK: Tensor, power_of_two: bool = False) -> Quantized:
    """As `quantize_activation_reference`, with the codes' values in float32."""
    return quantize_in_rows(x_MK, power_of_two, round_to_e4m3, torch.float32)


def quantize_in_rows(
    x_MK: Tensor, power_of_two: PowerOfTwo, rounding: Rounding, dtype: torch.dtype, block: int = BLOCK
) -> Quantized:
    """In blocks of 1 x `block`. dtype: of the codes that `rounding` gives."""
    rows, columns = x_MK.shape
    blocks = -(-columns // block)
    codes = torch.empty(rows, columns, dtype=dtype, device=x_MK.device)
    scale = torch.empty(rows, blocks, device=x_MK.device)
    for chunk in row_chunks(rows, blocks * block, 1):
        padded = _padded(x_MK[chunk], 1, block).view(-1, blocks, block)
        rounded, scale[chunk] = _quantize_blocks(padded, (2,), power_of_two, rounding)
        codes[chunk] = rounded.view(-1, blocks * block)[:, :columns]
    return Quantized(codes, scale)


# ---------------------------------------------------------------- weight: 128 x 128


def quantize_weight_reference(w_NK: Tensor, power_of_two: bool = False, name: str = "weight") -> Quantized:
    """[N, K] -> codes [N, K] E4M3, scale [ceil(N/128), ceil(K/128)] float32.

    Raises NonFiniteError, which names the tensor, if it holds a value that is not finite in BF16.
    """
    check_finite(w_NK, name)
    rows, columns = w_NK.shape
    padded = _padded(w_NK, BLOCK, BLOCK)
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    codes, scale = _quantize_blocks(blocks, (1, 3), power_of_two, encode_e4m3)
    return Quantized(codes.view(padded.shape)[:rows, :columns].contiguous(), scale)


def check_finite(x: Tensor, name: str) -> None:
    """Raise NonFiniteError if `x` holds values that are not finite in BF16, from which codes are computed. float32's
    largest values round to infinity in BF16. The error has the tensor's name, the count and the first place. Reads the
    host.
    """
    x = x.to(torch.bfloat16)
    bad = int(non_finite_count(x))
    if bad:
        first = tuple(int(i) for i in (~x.isfinite()).nonzero()[0])
        raise NonFiniteError(
            f"{name}: {bad} non-finite value(s), the first at {first}; FP8 needs weights that are finite in BF16"
        )


def non_finite_count(x: Tensor) -> Tensor:
    """Number of NaN or infinite elements: an int64 scalar on x's device, without a host read."""
    return (~x.isfinite()).sum()


# ---------------------------------------------------------------- tokens: 128 x 1, the operand of wgrad


def quantize_tokens_reference(x_TK: Tensor, power_of_two: bool = False, square: bool = False) -> Quantized:
    """[T, K] -> codes [K, T'] E4M3, scale [K, T'/128] float32; T' is T padded with zeros to a multiple of 128.

    `square`: one scale for 128 tokens x 128 columns, scale [ceil(K/128), T'/128].
    """
    codes, scale = _quantize_tokens(x_TK, power_of_two, square, encode_e4m3, E4M3)
    return Quantized(codes.contiguous(), scale.contiguous())


def quantize_tokens_values(x_TK: Tensor, power_of_two: bool = False, square: bool = False) -> Quantized:
    """As `quantize_tokens_reference`, with the codes' values in float32. Both are views of [T', K] and [T'/128, .]."""
    return _quantize_tokens(x_TK, power_of_two, square, round_to_e4m3, torch.float32)


def _quantize_tokens(
    x_TK: Tensor, power_of_two: bool, square: bool, rounding: Rounding, dtype: torch.dtype
) -> Quantized:
    tokens, columns = x_TK.shape
    blocks, width = -(-tokens // BLOCK), BLOCK if square else 1
    column_blocks = -(-columns // width)
    codes = torch.empty(blocks * BLOCK, columns, dtype=dtype, device=x_TK.device)
    scale = torch.empty(blocks, column_blocks, device=x_TK.device)
    for chunk in row_chunks(tokens, column_blocks * width, BLOCK):
        padded = _padded(x_TK[chunk], BLOCK, width).view(-1, BLOCK, column_blocks, width)
        first, last = chunk.start // BLOCK, chunk.start // BLOCK + padded.shape[0]
        rounded, scale[first:last] = _quantize_blocks(padded, (1, 3), power_of_two, rounding)
        codes[first * BLOCK : last * BLOCK] = rounded.view(-1, column_blocks * width)[:, :columns]
    return Quantized(codes.t(), scale.t())


def is_square(tokens: Quantized) -> bool:
    """Whether token codes [K, T'] have one scale for 128 columns rather than one for each (K = 1: both are the
    same)."""
    rows, blocks = tokens.codes.shape[0], tokens.codes.shape[1] // BLOCK
    square = tokens.scale.shape[0] != rows
    want = (-(-rows // BLOCK) if square else rows, blocks)
    assert tokens.scale.shape == want, f"token scale {tuple(tokens.scale.shape)}, expected {want}"
    return square


# ---------------------------------------------------------------- KV cache


def quantize_kv_per_head(x_TKD: Tensor, scale_K: Tensor) -> Quantized:
    """[T, K, D] with one given scale per head: code = e4m3(clamp(x * inverse_of(scale))). Values beyond 448
    saturate."""
    x = _bf16_rounded(x_TKD) * inverse_of(scale_K)[None, :, None]
    return Quantized(encode_e4m3(x.clamp(-E4M3_MAX, E4M3_MAX)), scale_K)


def quantize_kv_per_token(x_TKD: Tensor) -> Quantized:
    """[T, K, D] -> codes [T, K, D], scale [T, K]: one scale per token and head, by the rule of every block."""
    x = _bf16_rounded(x_TKD)
    scale, inverse = scale_and_inverse(x.abs().amax(2))
    return Quantized(encode_e4m3((x * inverse[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX)), scale)


def quantize_kv_int8(x_TKD: Tensor) -> Quantized:
    """[T, K, D] -> codes int8 [T, K, D], scale [T, K] = amax / 127: code = round(x * (127 / amax)), ties to even.

    The codes of a head with a value that is not finite are 0, and its scale is NaN.
    """
    x = _bf16_rounded(x_TKD)
    scale, inverse = scale_and_inverse(x.abs().amax(2), largest=INT8_MAX)
    codes = (x * inverse[:, :, None]).round_().clamp_(-INT8_MAX, INT8_MAX).nan_to_num_(nan=0.0)
    return Quantized(codes.to(torch.int8), scale)


def quantize_kv(x_TKD: Tensor, kv_mode: KVMode) -> Quantized:
    """`quantize_kv_int8` or `quantize_kv_per_token`, by the mode. Both have a scale for each token and head."""
    return quantize_kv_int8(x_TKD) if kv_mode == "int8" else quantize_kv_per_token(x_TKD)


# ---------------------------------------------------------------- back to float32


def dequantize(q: Quantized, block: tuple[int, int]) -> Tensor:
    """`code * scale` in float32 for 2-D codes. `block`: (1, 128) for activations and tokens, (128, 128) for weights."""
    rows, columns = q.codes.shape
    scale = q.scale
    for dim, size in enumerate(block):
        if size > 1:
            scale = scale.repeat_interleave(size, dim)
    return decode_e4m3(q.codes) * scale[:rows, :columns]


def dequantize_activation(q: Quantized) -> Tensor:
    """[M, K] float32."""
    return dequantize(q, (1, BLOCK))


def dequantize_tokens(q: Quantized) -> Tensor:
    """[T', K] float32, in the orientation that the tensor had before `quantize_tokens` transposed it."""
    values_TK, scale_BK = decode_e4m3(q.codes).t(), q.scale.t()
    if is_square(q):
        scale_BK = scale_BK.repeat_interleave(BLOCK, 1)[:, : values_TK.shape[1]]
    blocks = values_TK.reshape(scale_BK.shape[0], BLOCK, scale_BK.shape[1])
    return (blocks * scale_BK[:, None, :]).view(values_TK.shape)


def dequantize_weight(q: Quantized) -> Tensor:
    """[N, K] float32."""
    return dequantize(q, (BLOCK, BLOCK))
