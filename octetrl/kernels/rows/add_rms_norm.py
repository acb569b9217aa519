"""Add to the residual, apply RMSNorm and quantise the result to E4M3, in one pass over the rows.

    residual' = round(residual + delta)                    in place, in the model's dtype
    normed    = rms_norm(residual', weight, eps)           kernels/rows/rms_norm.py
    codes     = quantize_activation(normed)                kernels/quantize/quantize_activation.py, blocks of 1 x 128

delta is a tensor, or the sum of a mixture's experts, which the kernel then computes (`combine_experts`).

It stores the norm, its codes, or both. Both are for a norm that a BF16 product and an FP8 product read, such as a
router and its experts.

The bits equal those of the calls one after the other. The sum over a row uses the columns and warps of
`rms_norm`'s kernel, and therefore its layout: eight neighbouring elements a thread, which fixes the order of additions.
Codes are stored through a tile of three axes. With two axes, the compiler would give a thread sixteen one-byte
elements, also in the loads, and the sum would have another order.

Each element costs 2 + 2 bytes read and 2 + 1 + 4/128 written, with both forms 2 more. Not differentiable, and the
residual is overwritten. The fused forwards of rollout and training use it; training's backward is written out
(rms_norm_backward.py).

T tokens, E hidden size, S experts a token, P = T S of their rows, R rows of a tile, C its columns, N blocks of 128 in a
row.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.programmatic_launch import let_next_start, lets_next_start
from octetrl.kernels.quantize.quantize_activation import block_scale, e4m3_byte, empty_rows, magnitude_bits, scale_rows
from octetrl.kernels.rows.combine_experts import ExpertSum, combine_experts_reference
from octetrl.kernels.rows.rms_norm import PROGRAM_ELEMENTS, rms_norm_reference

Addend = Tensor | ExpertSum | None


@triton.jit
def _store_codes(
    y_RC, code_ptr, scale_ptr, row_R, num_rows, SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Quantise rows of float32 `y`, zero past the row's end, in blocks along the row."""
    BLOCKS: tl.constexpr = BLOCK_C // BLOCK
    y_RNC = tl.reshape(y_RC, (BLOCK_R, BLOCKS, BLOCK))
    scale_RN, inverse_RN = block_scale(tl.max(magnitude_bits(y_RNC), 2), POWER_OF_TWO)
    code_RNC = e4m3_byte(y_RNC * inverse_RN[:, :, None])
    block_N = tl.arange(0, BLOCKS)
    column_NC = block_N[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_NC = tl.max_contiguous(column_NC, (1, 8))  # a thread stores the eight codes that it holds
    inside_RNC = (row_R < num_rows)[:, None, None] & (column_NC < SIZE)[None, :, :]
    tl.store(code_ptr + row_R[:, None, None] * SIZE + column_NC[None, :, :], code_RNC, mask=inside_RNC)
    inside_RN = (row_R < num_rows)[:, None] & (block_N * BLOCK < SIZE)[None, :]
    tl.store(
        scale_ptr + block_N[None, :].to(tl.int64) * scale_rows(num_rows) + row_R[:, None], scale_RN, mask=inside_RN
    )


@triton.jit
def _sum_experts(
    expert_ptr, slot_weight_ptr, slot_row_ptr, shared_ptr, row_R, inside_R, column_C, inside_RC,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    """`combine_experts` for these rows, rounded to the dtype."""
    sum_RC = tl.zeros(inside_RC.shape, tl.float32)
    for slot in tl.static_range(SLOTS):
        from_R = tl.load(slot_row_ptr + row_R * SLOTS + slot, mask=inside_R, other=0)
        weight_R = tl.load(slot_weight_ptr + row_R * SLOTS + slot, mask=inside_R, other=0.0)
        value_RC = tl.load(expert_ptr + from_R[:, None] * SIZE + column_C[None, :], mask=inside_RC, other=0.0)
        sum_RC += value_RC.to(tl.float32) * weight_R[:, None]
    if HAS_SHARED:
        shared_RC = tl.load(shared_ptr + row_R[:, None] * SIZE + column_C[None, :], mask=inside_RC, other=0.0)
        sum_RC += shared_RC.to(tl.float32)
    return sum_RC.to(expert_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    delta_ptr, slot_weight_ptr, slot_row_ptr, shared_ptr, residual_ptr, weight_ptr, y_ptr, code_ptr, scale_ptr,
    num_rows, stride_delta, stride_residual, eps,
    SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    SLOTS: tl.constexpr, HAS_SHARED: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column_C = tl.arange(0, BLOCK_C)
    inside_RC = (row_R < num_rows)[:, None] & (column_C < SIZE)[None, :]
    residual_RC = residual_ptr + row_R[:, None] * stride_residual + column_C[None, :]
    x_RC = tl.load(residual_RC, mask=inside_RC, other=0.0)
    weight_1C = tl.load(weight_ptr + column_C[None, :], mask=column_C[None, :] < SIZE, other=0.0).to(tl.float32)
    dtype = residual_ptr.dtype.element_ty
    if ADD:
        if SLOTS > 0:
            delta_RC = _sum_experts(
                delta_ptr, slot_weight_ptr, slot_row_ptr, shared_ptr, row_R, row_R < num_rows, column_C, inside_RC,
                SIZE, SLOTS, HAS_SHARED,
            )  # fmt: skip
        else:
            delta_RC = tl.load(delta_ptr + row_R[:, None] * stride_delta + column_C[None, :], mask=inside_RC, other=0.0)
        x_RC = (x_RC.to(tl.float32) + delta_RC.to(tl.float32)).to(dtype)
        tl.store(residual_RC, x_RC, mask=inside_RC)
    x_RC = x_RC.to(tl.float32)
    rstd_R = tl.rsqrt(tl.sum(x_RC * x_RC, axis=1) * (1.0 / SIZE) + eps)
    xhat_RC = (x_RC * rstd_R[:, None]).to(weight_ptr.dtype.element_ty).to(tl.float32)
    y_RC = (xhat_RC * weight_1C).to(dtype)
    if KEEP:
        tl.store(y_ptr + row_R[:, None] * SIZE + column_C[None, :], y_RC, mask=inside_RC)
    if QUANTIZE:
        y_RC = y_RC.to(tl.bfloat16).to(tl.float32)
        _store_codes(y_RC, code_ptr, scale_ptr, row_R, num_rows, SIZE, BLOCK_C, BLOCK_R, BLOCK, POWER_OF_TWO)


def _run_kernel(
    delta: Addend,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    *,
    keep: bool,
    quantize: bool,
    power_of_two: bool,
) -> tuple[Tensor | None, Quantized | None]:
    """The warps are those of `rms_norm_triton`. Short rows share a program, as they do there. `keep`: store the norm
    itself; `quantize`: its codes."""
    rows, size = residual_TE.shape
    block_c = triton.next_power_of_2(size)
    block_r = 1 if block_c >= 1024 else PROGRAM_ELEMENTS // block_c
    device = residual_TE.device
    y_TE = torch.empty(rows, size, dtype=residual_TE.dtype, device=device) if keep else None
    codes, scale = empty_rows(rows, size, device) if quantize else (None, None)
    addend = delta if isinstance(delta, ExpertSum) else (delta, None, None, None)
    slots = delta.row_TS.shape[1] if isinstance(delta, ExpertSum) else 0
    if rows:
        _add_rms_norm_kernel[(triton.cdiv(rows, block_r),)](
            *addend, residual_TE, weight_E, y_TE, codes, scale, rows,
            0 if addend[0] is None else addend[0].stride(0), residual_TE.stride(0), eps,
            SIZE=size, BLOCK_C=block_c, BLOCK_R=block_r, BLOCK=min(BLOCK, block_c), ADD=delta is not None,
            SLOTS=slots, HAS_SHARED=addend[3] is not None, KEEP=keep, QUANTIZE=quantize, POWER_OF_TWO=power_of_two,
            EARLY=lets_next_start(residual_TE), num_warps=8 if block_c > 1024 else 4,
            **({"enable_fp_fusion": False} if residual_TE.is_cuda else {}),
        )  # fmt: skip
    return y_TE, None if codes is None or scale is None else Quantized(codes.view(E4M3), scale)


def add_rms_norm_triton(
    delta: Addend,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    *,
    quantize: bool,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor | Quantized]:
    """The launcher for one form of the norm."""
    operands = delta, residual_TE, weight_E, eps
    y_TE, codes = _run_kernel(*operands, keep=not quantize, quantize=quantize, power_of_two=power_of_two)
    y = y_TE if codes is None else codes
    assert y is not None
    return residual_TE, y


def add_rms_norm_both_triton(
    delta: Addend, residual_TE: Tensor, weight_E: Tensor, eps: float, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Quantized]:
    """The launcher for both forms."""
    operands = delta, residual_TE, weight_E, eps
    y_TE, codes = _run_kernel(*operands, keep=True, quantize=True, power_of_two=power_of_two)
    assert y_TE is not None and codes is not None
    return residual_TE, y_TE, codes


def add_rms_norm_reference(
    delta: Addend,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    *,
    quantize: bool,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor | Quantized]:
    """The same in plain torch, from the references of its parts."""
    if delta is not None:
        residual_TE.add_(combine_experts_reference(*delta) if isinstance(delta, ExpertSum) else delta)
    y_TE = rms_norm_reference(residual_TE, weight_E, eps)
    return residual_TE, quantize_activation_reference(y_TE, power_of_two) if quantize else y_TE


def add_rms_norm_both_reference(
    delta: Addend, residual_TE: Tensor, weight_E: Tensor, eps: float, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Quantized]:
    """The same in plain torch."""
    _, y_TE = add_rms_norm_reference(delta, residual_TE, weight_E, eps, quantize=False)
    assert isinstance(y_TE, Tensor)
    return residual_TE, y_TE, quantize_activation_reference(y_TE, power_of_two)


@overload
def add_rms_norm(
    delta: Addend, residual_TE: Tensor, weight_E: Tensor, eps: float, *, quantize: Literal[False],
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def add_rms_norm(
    delta: Addend, residual_TE: Tensor, weight_E: Tensor, eps: float, *, quantize: Literal[True],
    power_of_two: bool = False,
) -> tuple[Tensor, Quantized]: ...  # fmt: skip


@overload
def add_rms_norm(
    delta: Addend, residual_TE: Tensor, weight_E: Tensor, eps: float, *, quantize: bool,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor | Quantized]: ...  # fmt: skip


def add_rms_norm(
    delta: Addend,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    *,
    quantize: bool,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor | Quantized]:
    """residual + delta, in place, and its norm: [T, E], or codes [T, E] and scale [T, ceil(E/128)].

    delta: [T, E], an `ExpertSum` of T tokens, or None. residual_TE is overwritten if delta is given, and returned. With
    delta None it is only normed. All are BF16 or all float32, with contiguous last axes. On CUDA the scale has the
    strides (1, T).
    """
    _check(delta, residual_TE, weight_E)
    run = add_rms_norm_triton if residual_TE.is_cuda else add_rms_norm_reference
    return run(delta, residual_TE, weight_E, eps, quantize=quantize, power_of_two=power_of_two)


def add_rms_norm_both(
    delta: Addend, residual_TE: Tensor, weight_E: Tensor, eps: float, power_of_two: bool = False
) -> tuple[Tensor, Tensor, Quantized]:
    """As `add_rms_norm`, with both forms of the norm: residual, [T, E], and its codes."""
    _check(delta, residual_TE, weight_E)
    run = add_rms_norm_both_triton if residual_TE.is_cuda else add_rms_norm_both_reference
    return run(delta, residual_TE, weight_E, eps, power_of_two)


def _check(delta: Addend, residual_TE: Tensor, weight_E: Tensor) -> None:
    assert residual_TE.dim() == 2 and residual_TE.shape[1] == weight_E.numel(), f"add_rms_norm: {residual_TE.shape}"
    addends: tuple[Tensor | None, ...]
    if isinstance(delta, ExpertSum):
        tokens, slots = delta.row_TS.shape
        assert len(delta.y_PE) == tokens * slots, f"add_rms_norm: {len(delta.y_PE)} rows of {tokens} x {slots} experts"
        for x, dtype in ((delta.weight_TS, torch.float32), (delta.row_TS, torch.int64)):
            assert x.shape == delta.row_TS.shape and x.dtype == dtype, (
                f"add_rms_norm: {_form(x)}, must be {(tokens, slots)} {dtype}"
            )
        assert all(x is None or x.is_contiguous() for x in delta), "add_rms_norm: strides of the experts' rows"
        addends = delta.y_PE[:tokens], delta.shared_TE
    else:
        addends = (delta,)
    for x in (residual_TE, *(x for x in addends if x is not None)):
        assert x.shape == residual_TE.shape and x.dtype == residual_TE.dtype, (
            f"add_rms_norm: {_form(x)}, must be {_form(residual_TE)}"
        )
        assert x.stride(1) == 1, f"add_rms_norm: last axis has stride {x.stride(1)}, must be 1"


def _form(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
