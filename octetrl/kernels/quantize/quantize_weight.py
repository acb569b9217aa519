"""Quantise a weight [N, K] to E4M3 in blocks of 128 x 128, once per optimizer step.

    scale = amax / 448,   code = e4m3(clamp(w * 448 / amax, ±448))        fp8/quantize.py, with its special cases

One program takes one block, in one read. It writes codes for the forward, transposed codes for dgrad, or both. The
result goes into the given codes and scale, if any. Those are the buffers that the engine reads, so publishing a weight
is this one kernel without a copy. quantize_tokens.py explains how a tile is held and transposed.

A non-finite weight is an error that names the weight. The kernel sets its block's scale to NaN, and one later read of
the small scale tensor looks for NaN. A model with many weights launches all of them first and reads once
(`check=False`, then `check_scales`). quantize_weights.py takes many weights in one launch.

Each element costs 2 bytes read and 1 written, or 2 with codes in both orientations. The bytes equal the reference's.

Layout: w [N, K] with K contiguous. Codes [N, K], transposed codes [K, N] and scale [ceil(N/128), ceil(K/128)] are
contiguous.

N rows, K columns, G groups of four rows, C the 128 columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, check_finite, quantize_weight_reference
from octetrl.kernels.instructions import bf16_to_float, e4m3_code, to_bf16
from octetrl.kernels.quantize.quantize_activation import block_scale
from octetrl.kernels.quantize.quantize_tokens import (
    TOKEN_BLOCKS,
    load_quarter,
    store_tokens,
    tile_magnitudes,
    tile_place,
)

WARPS = 4
REGISTERS: int | None = None  # limit for a thread; None leaves it to the compiler


@triton.jit
def _store_rows(
    w_GC, inverse, code_ptr, columns, rows_left, columns_left,
    QUARTER: tl.constexpr, ON_GPU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row_G = tl.arange(0, BLOCK // 4) * 4 + QUARTER
    column_C = tl.arange(0, BLOCK)
    inside_GC = (row_G < rows_left)[:, None] & (column_C < columns_left)[None, :]
    code_GC = e4m3_code(bf16_to_float(w_GC, ON_GPU, True) * inverse, ON_GPU)
    tl.store(code_ptr + row_G[:, None] * columns + column_C[None, :], code_GC, mask=inside_GC)


@triton.jit
def quantize_block(
    tile, w_ptr, code_ptr, transposed_ptr, scale_ptr, N, K, row_stride,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, ON_GPU: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise the tile-th block of a weight."""
    row_block, column_block = tile_place(tile, N, K, TOKEN_BLOCKS, BLOCK)
    row, column = row_block.to(tl.int64) * BLOCK, column_block.to(tl.int64) * BLOCK
    rows_left, columns_left = N - row_block * BLOCK, K - column_block * BLOCK
    w_ptr += row * row_stride + column
    w0_GC = to_bf16(load_quarter(w_ptr, row_stride, rows_left, columns_left, 0, BLOCK), ON_GPU)
    w1_GC = to_bf16(load_quarter(w_ptr, row_stride, rows_left, columns_left, 1, BLOCK), ON_GPU)
    w2_GC = to_bf16(load_quarter(w_ptr, row_stride, rows_left, columns_left, 2, BLOCK), ON_GPU)
    w3_GC = to_bf16(load_quarter(w_ptr, row_stride, rows_left, columns_left, 3, BLOCK), ON_GPU)
    amax_C = tl.max(tile_magnitudes(w0_GC, w1_GC, w2_GC, w3_GC, ON_GPU), 0)
    scale, inverse = block_scale(tl.max(amax_C, 0), POWER_OF_TWO)
    scale_ptr += row_block * tl.cdiv(K, BLOCK) + column_block
    tl.store(scale_ptr, scale)
    if ROWS:
        code_ptr += row * K + column
        _store_rows(w0_GC, inverse, code_ptr, K, rows_left, columns_left, 0, ON_GPU, BLOCK)
        _store_rows(w1_GC, inverse, code_ptr, K, rows_left, columns_left, 1, ON_GPU, BLOCK)
        _store_rows(w2_GC, inverse, code_ptr, K, rows_left, columns_left, 2, ON_GPU, BLOCK)
        _store_rows(w3_GC, inverse, code_ptr, K, rows_left, columns_left, 3, ON_GPU, BLOCK)
    if TRANSPOSED:
        store_tokens(
            w0_GC, w1_GC, w2_GC, w3_GC, amax_C, transposed_ptr + column * N + row, scale_ptr, N, columns_left,
            POWER_OF_TWO, True, ON_GPU, BLOCK,
        )  # fmt: skip


@triton.jit
def _quantize_weight_kernel(
    w_ptr, code_ptr, transposed_ptr, scale_ptr, N, K, row_stride,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr, ON_GPU: tl.constexpr,
    TOKEN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    quantize_block(
        tl.program_id(0), w_ptr, code_ptr, transposed_ptr, scale_ptr, N, K, row_stride,
        POWER_OF_TWO, ROWS, TRANSPOSED, ON_GPU, TOKEN_BLOCKS, BLOCK,
    )  # fmt: skip


def quantize_weight_triton(
    w_NK: Tensor, power_of_two: bool, out: Quantized, transposed_KN: Tensor | None = None
) -> Quantized:
    """The Triton launcher: w_NK BF16 or float32, any N and K. Writes `out` and the transposed codes."""
    whole = w_NK.shape[0] % BLOCK == 0
    _launch(w_NK, power_of_two, out.codes, transposed_KN if whole else None, out.scale)
    if transposed_KN is not None and not whole:
        transposed_KN.copy_(out.codes.t())
    return out


def _launch(
    w_NK: Tensor, power_of_two: bool, codes_NK: Tensor | None, transposed_KN: Tensor | None, scale: Tensor
) -> None:
    """The transposed codes only of whole blocks: an incomplete block would write past its rows."""
    if w_NK.stride(1) != 1:
        w_NK = w_NK.contiguous()
    written = [None if codes is None else codes.view(torch.uint8) for codes in (codes_NK, transposed_KN)]
    assert all(codes is None or codes.is_contiguous() for codes in written), "codes must be contiguous"
    assert scale.is_contiguous(), "scale must be contiguous"
    rows, columns = w_NK.shape
    _quantize_weight_kernel[(triton.cdiv(rows, BLOCK) * triton.cdiv(columns, BLOCK),)](
        w_NK, *written, scale, rows, columns, w_NK.stride(0), POWER_OF_TWO=power_of_two,
        ROWS=codes_NK is not None, TRANSPOSED=transposed_KN is not None, ON_GPU=w_NK.is_cuda,
        TOKEN_BLOCKS=TOKEN_BLOCKS, BLOCK=BLOCK, num_warps=WARPS, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip


def quantize_weight(
    w_NK: Tensor,
    power_of_two: bool = False,
    *,
    name: str = "weight",
    out: Quantized | None = None,
    transposed_KN: Tensor | None = None,
    check: bool = True,
) -> Quantized:
    """[N, K] -> codes [N, K] E4M3, scale [ceil(N/128), ceil(K/128)] float32, into `out` if given. The codes also go
    into `transposed_KN` if given.

    Raises NonFiniteError, which names the tensor, if it holds a non-finite value. A CPU's `out` is then unchanged; a
    GPU's must not be used. `check=False` leaves the check to `check_scales` (GPU only) and does not read the host.
    """
    assert w_NK.dim() == 2, f"expected [N, K], got {tuple(w_NK.shape)}"
    if w_NK.is_cuda:
        out = quantize_weight_triton(w_NK, power_of_two, _empty_like(w_NK) if out is None else out, transposed_KN)
        if check:
            check_scales({name: (w_NK, out.scale)})
        return out
    quantized = quantize_weight_reference(w_NK, power_of_two, name)
    if out is None:
        out = quantized
    else:
        out.codes.copy_(quantized.codes)
        out.scale.copy_(quantized.scale)
    if transposed_KN is not None:
        transposed_KN.copy_(out.codes.t())
    return out


def quantize_weight_transposed(w_NK: Tensor, power_of_two: bool = False) -> Quantized:
    """The codes of `quantize_weight` in dgrad's orientation: [K, N], scale [ceil(K/128), ceil(N/128)]. The weight must
    be known to be finite."""
    if w_NK.is_cuda and w_NK.shape[0] % BLOCK == 0:
        return quantize_weight_transposed_triton(w_NK, power_of_two)
    made = quantize_weight(w_NK, power_of_two, check=False)
    return Quantized(made.codes.t().contiguous(), made.scale.t())


def quantize_weight_transposed_triton(w_NK: Tensor, power_of_two: bool) -> Quantized:
    """The transposed codes only, without the codes [N, K]. N is a multiple of 128."""
    made = _empty_like(w_NK)
    codes_KN = made.codes.view(w_NK.shape[1], w_NK.shape[0])
    _launch(w_NK, power_of_two, None, codes_KN, made.scale)
    return Quantized(codes_KN, made.scale.t())


def check_scales(quantized: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise NonFiniteError for the first of these weights whose scale is not finite. One host read for all of them."""
    scales = [scale.flatten() for _, scale in quantized.values()]
    if scales and bool(torch.cat(scales).isnan().any()):
        for name, (w_NK, _) in quantized.items():
            check_finite(w_NK, name)


def _empty_like(w_NK: Tensor) -> Quantized:
    blocks = [triton.cdiv(size, BLOCK) for size in w_NK.shape]
    return Quantized(
        torch.empty(w_NK.shape, dtype=E4M3, device=w_NK.device),
        torch.empty(blocks, dtype=torch.float32, device=w_NK.device),
    )
