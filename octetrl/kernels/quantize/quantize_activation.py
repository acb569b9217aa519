"""Quantise an activation [M, K] to E4M3 in blocks of 1 x 128 along K: operand of the forward and dgrad GEMMs.

    scale = amax / 448,   code = e4m3(clamp(x * 448 / amax, ±448))        fp8/quantize.py, with its special cases

One program takes 32 rows of one block column: a tile [32, 128] with one amax for each row. `block_scale` and
`e4m3_byte` are the device form of the rule, and every quantiser here uses them. The amax is a maximum of *bit
patterns*: as integers, magnitudes of floats keep their order and NaN is above infinity. A float maximum could lose a
NaN.

Layout: x [M, K] with K contiguous. The scale is stored as [ceil(K/128), M] and returned transposed, with the strides
(1, M) that scaled_mm requires of a 1x128 operand. The bytes equal the reference's. Each element costs 2 bytes read and
1 + 4/128 written.

M rows, K columns, R rows of a tile, C columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.programmatic_launch import let_next_start, lets_next_start

_ROWS = 32


@triton.jit
def magnitude_bits(x):
    """The bits of |x| for float32 `x`. They have the order of the magnitudes; NaN is largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scale(amax_bits, POWER_OF_TWO: tl.constexpr):
    """(scale, inverse) of blocks whose amax has these bits. Both are NaN if it is not finite."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 448.0)
    if POWER_OF_TWO:
        power_bits = (scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
        scale = tl.minimum(power_bits, 0x7B000000).to(tl.float32, bitcast=True)  # at most 2^119: no value is infinite
        inverse = tl.div_rn(1.0, scale)
    else:
        inverse = tl.minimum(tl.div_rn(448.0, amax), 3.4028234663852886e38)
    scale = tl.where(amax_bits == 0, 1.0, scale)
    inverse = tl.where(amax_bits == 0, 1.0, inverse)
    bad = amax_bits >= 0x7F800000
    return tl.where(bad, float("nan"), scale), tl.where(bad, float("nan"), inverse)


@triton.jit
def held_inverse(scale):
    """`inverse_of` a given scale (fp8/quantize.py)."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.minimum(inverse, 3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def e4m3_byte(scaled):
    """The E4M3 byte of float32 `scaled`, clamped to ±448 and rounded to nearest even. NaN gives 0x7F."""
    code = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(scaled != scaled, 0x7F, code).to(tl.uint8)


@triton.jit
def scale_rows(num_rows):
    """The stride between two blocks' scales, as `empty_rows` allocates it."""
    return (num_rows + 3) // 4 * 4


@triton.jit(do_not_specialize=["M"])
def _quantize_activation_kernel(
    x_ptr, code_ptr, scale_ptr, M, K, row_stride, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    block = tl.program_id(1)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column_C = block * BLOCK + tl.arange(0, BLOCK)
    inside_RC = (row_R < M)[:, None] & (column_C < K)[None, :]
    x_RC = tl.load(x_ptr + row_R[:, None] * row_stride + column_C[None, :], mask=inside_RC, other=0.0)
    x_RC = x_RC.to(tl.bfloat16).to(tl.float32)
    scale_R, inverse_R = block_scale(tl.max(magnitude_bits(x_RC), 1), POWER_OF_TWO)
    code_RC = e4m3_byte(x_RC * inverse_R[:, None])
    tl.store(code_ptr + row_R[:, None] * K + column_C[None, :], code_RC, mask=inside_RC)
    tl.store(scale_ptr + block.to(tl.int64) * scale_rows(M) + row_R, scale_R, mask=row_R < M)


def empty_rows(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for codes, uint8 [rows, columns], and scales, float32 [rows, ceil(columns/128)] with strides (1, room).
    Both have room for a multiple of four rows, so that scaled_mm can read them without a copy."""
    room = -(-rows // 4) * 4
    codes = torch.empty(room, columns, dtype=torch.uint8, device=device)
    scale = torch.empty(triton.cdiv(columns, BLOCK), room, dtype=torch.float32, device=device)
    return codes[:rows], scale.t()[:rows]


def scale_rows_of(quantized: Quantized) -> Tensor:
    """The scales of [rows, columns] as one contiguous tensor [ceil(columns/128), room], as `empty_rows` allocates
    them. Without a copy if they lie so."""
    rows, blocks = quantized.scale.shape
    room, scale = -(-rows // 4) * 4, quantized.scale
    held = scale.untyped_storage().nbytes() // scale.element_size() - scale.storage_offset()
    if scale.stride(0) == 1 and (blocks == 1 or scale.stride(1) == room) and held >= blocks * room:
        return scale.as_strided((blocks, room), (room, 1))
    whole = scale.new_zeros(blocks, room)
    whole[:, :rows] = scale.t()
    return whole


def quantize_activation_triton(x_MK: Tensor, power_of_two: bool = False) -> Quantized:
    """The Triton launcher: x_MK BF16 or float32, any M and K."""
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    rows, columns = x_MK.shape
    blocks = triton.cdiv(columns, BLOCK)
    codes, scale = empty_rows(rows, columns, x_MK.device)
    if rows:
        _quantize_activation_kernel[(triton.cdiv(rows, _ROWS), blocks)](
            x_MK, codes, scale, rows, columns, x_MK.stride(0),
            POWER_OF_TWO=power_of_two, ROWS=_ROWS, BLOCK=BLOCK, EARLY=lets_next_start(x_MK), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return Quantized(codes.view(E4M3), scale)


def quantize_activation(x_MK: Tensor, power_of_two: bool = False) -> Quantized:
    """[M, K] -> codes [M, K] E4M3, scale [M, ceil(K/128)] float32 (on CUDA with strides (1, roundup(M, 4)))."""
    assert x_MK.dim() == 2, f"expected [M, K], got {tuple(x_MK.shape)}"
    quantize = quantize_activation_triton if x_MK.is_cuda else quantize_activation_reference
    return quantize(x_MK, power_of_two)
