"""The causal convolution of gated DeltaNet, and from it the heads of q, k and v.

    c_t = w_0 x_{t-3} + w_1 x_{t-2} + w_2 x_{t-1} + w_3 x_t        of each channel, added in this order, float32
    y   = c sigmoid(c)
    v   = round(y)      k = round(y / sqrt(sum y^2 + 1e-6))      q = round(k's formula / sqrt(K))

Rows before a sequence's first one are zero. In the engine they are read from the slot's `conv` if their position is not
negative, and the new rows are written there (state.py says which). The sum of squares is one fixed tree of one head in
one program, whatever the number of rows or the layout; the CPU form sums and computes the sigmoid in float64, as
silu_mul.py does.

The backward recomputes c. With s = sigmoid(c) and n = y rstd, dy = rstd (dn - n (n . dn)), dc = dy s (1 + c (1 - s)):

    dx_t = sum_j w_{3-j} dc_{t+j}      dw_j = sum_t dc_t x_{t-3+j}

T tokens, C channels (q, then k, then v), D size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from octetrl.kernels.delta_rule.chunk_tiles import ROWS as CHUNK_ROWS
from octetrl.kernels.delta_rule.chunk_tiles import levels, tree_sum
from octetrl.kernels.delta_rule.state import DeltaState, SlotRows
from octetrl.kernels.instructions import sigmoid
from octetrl.kernels.rows.rms_norm_backward import sum_partials
from octetrl.shapes.delta_rule import CHUNK, DeltaShape

EPS = 1e-6  # of the published models


class Heads(NamedTuple):
    """What the delta rule reads of each token, in the model's dtype."""

    q: Tensor  # [T, key heads, K]
    k: Tensor  # [T, key heads, K]
    v: Tensor  # [T, value heads, V]


def conv_heads_packed(
    x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int, shape: DeltaShape
) -> Heads:
    """q, k and v of packed sequences. Differentiable in x and weight, which have one dtype; last axes contiguous.

    max_seqlen: at least the longest sequence's length. Rows outside every sequence are zero.
    """
    return Heads(*_ConvHeads.apply(x_TC, weight_C4, cu_seqlens_B1, max_seqlen, shape))


def conv_heads_slots(x_TC: Tensor, weight_C4: Tensor, rows: SlotRows, state: DeltaState, shape: DeltaShape) -> Heads:
    """q, k and v of rows in the engine. `state.conv` receives the last rows of x."""
    return conv_heads(x_TC, weight_C4, rows.cu_seqlens_B1, shape, rows, state)


def conv_heads(
    x_TC: Tensor,
    weight_C4: Tensor,
    cu_seqlens_B1: Tensor,
    shape: DeltaShape,
    rows: SlotRows | None = None,
    state: DeltaState | None = None,
) -> Heads:
    """The forward of both forms."""
    assert x_TC.shape[1] == shape.channels == len(weight_C4), f"conv_heads: {x_TC.shape} and {weight_C4.shape}"
    assert x_TC.stride(1) == 1 and weight_C4.is_contiguous(), "conv_heads: last axes must be contiguous"
    run = conv_heads_triton if x_TC.is_cuda else conv_heads_reference
    return run(x_TC, weight_C4, cu_seqlens_B1, shape, rows, state)


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int, shape: DeltaShape
    ) -> Heads:
        ctx.save_for_backward(x_TC, weight_C4, cu_seqlens_B1)
        ctx.settings = (max_seqlen, shape)
        return conv_heads(x_TC, weight_C4, cu_seqlens_B1, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = gradients
        x_TC, weight_C4, cu_seqlens_B1 = ctx.saved_tensors
        found = conv_heads_backward(dq, dk, dv, x_TC, weight_C4, cu_seqlens_B1, *ctx.settings)
        return (*found, None, None, None)


def conv_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int,
    shape: DeltaShape,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx [T, C], contiguous, and dweight [C, 4], in their dtypes."""
    run = conv_heads_backward_triton if x_TC.is_cuda else conv_heads_backward_reference
    return run(dq, dk, dv, x_TC, weight_C4, cu_seqlens_B1, shape)


# ---------------------------------------------------------------- Triton

ROWS = 8  # tokens of a program
GRADIENT_ROWS = 16
PROGRAMS = 32  # along the tokens, that each sum a part of the weight's gradient; fixed as in rms_norm_backward


@triton.jit
def _offsets_of(token_R, cu_seqlens_ptr, num_sequences, ROWS: tl.constexpr):
    """Of each token: its sequence, its offset in it, and the sequence's length (0 outside every sequence)."""
    sequence_R = tl.zeros([ROWS], tl.int32)
    for first in range(0, num_sequences, 64):
        b = first + tl.arange(0, 64)
        end_B = tl.load(cu_seqlens_ptr + b + 1, mask=b < num_sequences, other=2147483647)
        sequence_R += tl.sum((end_B[None, :] <= token_R[:, None]).to(tl.int32), 1)
    is_inside_R = sequence_R < num_sequences
    sequence_R = tl.minimum(sequence_R, num_sequences - 1)
    start_R = tl.load(cu_seqlens_ptr + sequence_R)
    length_R = tl.where(is_inside_R, tl.load(cu_seqlens_ptr + sequence_R + 1) - start_R, 0)
    return sequence_R, token_R - start_R, length_R


@triton.jit
def _place(head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr):
    """A head's first channel, its size, its number among its kind, and how many of its kind there are."""
    is_value = head >= 2 * KEY_HEADS
    kind = tl.where(is_value, head - 2 * KEY_HEADS, head % KEY_HEADS)
    channel = tl.where(is_value, 2 * KEY_HEADS * KEY_SIZE + kind * VALUE_SIZE, head * KEY_SIZE)
    return channel, tl.where(is_value, VALUE_SIZE, KEY_SIZE), kind, tl.where(is_value, VALUE_HEADS, KEY_HEADS)


@triton.jit
def _tap(x_ptr, token_R, offset_R, back, column_D, inside_RD, stride_x):
    """x of the rows `back` rows before; zero before a sequence's first row."""
    reaches_RD = inside_RD & (offset_R >= back)[:, None]
    row_R = (token_R - back).to(tl.int64) * stride_x
    return tl.load(x_ptr + row_R[:, None] + column_D[None, :], mask=reaches_RD, other=0.0)


@triton.jit
def _conv_row(position, conv_rows, TAPS: tl.constexpr):
    """The row of a slot's `conv` that belongs to a position."""
    ring = conv_rows - 2 * (TAPS - 1)
    of_end = position % CHUNK_ROWS - (CHUNK_ROWS - TAPS + 1)
    at_end = ring + position // CHUNK_ROWS % 2 * (TAPS - 1) + of_end
    return tl.where(of_end >= 0, at_end, position % ring)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def _conv_heads_kernel(
    x_ptr, weight_ptr, out_ptr, cu_seqlens_ptr, slot_ptr, first_ptr, conv_ptr, num_tokens, num_sequences, stride_x,
    conv_rows, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, SLOTS: tl.constexpr,
    STORE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
    channel, size, kind, heads = _place(head, KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE)
    token_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence_R, offset_R, length_R = _offsets_of(token_R, cu_seqlens_ptr, num_sequences, ROWS)
    d_D = tl.arange(0, BLOCK_D)
    column_D = channel + d_D
    is_live_R = (offset_R < length_R) & (token_R < num_tokens)
    if SLOTS:
        slot_R = tl.load(slot_ptr + sequence_R, mask=is_live_R, other=-1)
        first_R = tl.load(first_ptr + sequence_R, mask=is_live_R, other=0)
        is_live_R = is_live_R & (slot_R >= 0)
    inside_RD = is_live_R[:, None] & (d_D < size)[None, :]
    c_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        x_RD = _tap(x_ptr, token_R, offset_R, back, column_D, inside_RD, stride_x)
        if SLOTS:
            position_R = first_R + offset_R - back
            is_kept_R = (offset_R < back) & (position_R >= 0)
            kept_R = (slot_R * conv_rows + _conv_row(tl.maximum(position_R, 0), conv_rows, TAPS)) * CHANNELS
            kept_RD = conv_ptr + kept_R[:, None] + column_D[None, :]
            x_RD = tl.where(
                is_kept_R[:, None], tl.load(kept_RD, mask=inside_RD & is_kept_R[:, None], other=0.0), x_RD
            )  # fmt: skip
        weight_D = tl.load(weight_ptr + column_D * TAPS + tap, mask=d_D < size, other=0.0).to(tl.float32)
        c_RD = c_RD + x_RD.to(tl.float32) * weight_D[None, :]
    if STORE:  # x_RD is the row itself
        kept_R = (slot_R * conv_rows + _conv_row(tl.maximum(first_R + offset_R, 0), conv_rows, TAPS)) * CHANNELS
        tl.store(conv_ptr + kept_R[:, None] + column_D[None, :], x_RD, mask=inside_RD)
    y_RD = c_RD * sigmoid(c_RD, ON_GPU)
    if head < 2 * KEY_HEADS:
        rstd_R = tl.rsqrt(tree_sum(y_RD * y_RD, ROWS, BLOCK_D, LEVELS) + eps)
        y_RD = y_RD * rstd_R[:, None]
        if head < KEY_HEADS:
            y_RD = y_RD * scale
    first_of_kind = tl.where(head < KEY_HEADS, 0, tl.where(head < 2 * KEY_HEADS, KEY_HEADS * KEY_SIZE, channel))
    first_of_kind = tl.where(head < 2 * KEY_HEADS, first_of_kind, 2 * KEY_HEADS * KEY_SIZE).to(tl.int64)
    out_R = first_of_kind * num_tokens + (token_R.to(tl.int64) * heads + kind) * size
    written_RD = (token_R < num_tokens)[:, None] & (d_D < size)[None, :]
    tl.store(out_ptr + out_R[:, None] + d_D[None, :], y_RD.to(out_ptr.dtype.element_ty), mask=written_RD)


@triton.jit
def _store_conv_kernel(
    x_ptr, cu_seqlens_ptr, slot_ptr, first_ptr, conv_ptr, stride_x, conv_rows,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """The last rows of each sequence, and those before its last chunk, once no program reads those before them any
    more. Rows that are both are written twice."""
    sequence = tl.program_id(0)
    column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.load(slot_ptr + sequence)
    start, end = tl.load(cu_seqlens_ptr + sequence), tl.load(cu_seqlens_ptr + sequence + 1)
    if slot >= 0:
        first = tl.load(first_ptr + sequence)
        last = first + end - start  # one past it
        ring = conv_rows - 2 * (TAPS - 1)
        for row in range(ring + TAPS - 1):
            position = tl.where(row < ring, last - 1 - row, (last - 1) // CHUNK_ROWS * CHUNK_ROWS - 1 - (row - ring))
            is_new_C = (column_C < CHANNELS) & (position >= first) & (position < last)
            kept = (slot * conv_rows + _conv_row(tl.maximum(position, 0), conv_rows, TAPS)) * CHANNELS
            x_C = tl.load(x_ptr + (start + position - first).to(tl.int64) * stride_x + column_C, mask=is_new_C)
            tl.store(conv_ptr + kept + column_C, x_C, mask=is_new_C)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def _conv_gradient_kernel(
    dq_ptr, dk_ptr, dv_ptr, x_ptr, weight_ptr, dc_ptr, cu_seqlens_ptr, num_tokens, num_sequences, stride_x, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """dc [T, C], zero outside every sequence."""
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_SIZE + VALUE_HEADS * VALUE_SIZE
    channel, size, kind, heads = _place(head, KEY_HEADS, VALUE_HEADS, KEY_SIZE, VALUE_SIZE)
    token_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _sequence_R, offset_R, length_R = _offsets_of(token_R, cu_seqlens_ptr, num_sequences, ROWS)
    d_D = tl.arange(0, BLOCK_D)
    column_D = channel + d_D
    inside_RD = ((offset_R < length_R) & (token_R < num_tokens))[:, None] & (d_D < size)[None, :]
    c_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tap in tl.static_range(TAPS):
        x_RD = _tap(x_ptr, token_R, offset_R, TAPS - 1 - tap, column_D, inside_RD, stride_x)
        weight_D = tl.load(weight_ptr + column_D * TAPS + tap, mask=d_D < size, other=0.0).to(tl.float32)
        c_RD = c_RD + x_RD.to(tl.float32) * weight_D[None, :]
    sigmoid_RD = sigmoid(c_RD, ON_GPU)
    from_RD = ((token_R.to(tl.int64) * heads + kind) * size)[:, None] + d_D[None, :]
    if head < KEY_HEADS:
        dy_RD = tl.load(dq_ptr + from_RD, mask=inside_RD, other=0.0).to(tl.float32) * scale
    elif head < 2 * KEY_HEADS:
        dy_RD = tl.load(dk_ptr + from_RD, mask=inside_RD, other=0.0).to(tl.float32)
    else:
        dy_RD = tl.load(dv_ptr + from_RD, mask=inside_RD, other=0.0).to(tl.float32)
    if head < 2 * KEY_HEADS:
        y_RD = c_RD * sigmoid_RD
        rstd_R = tl.rsqrt(tl.sum(y_RD * y_RD, axis=1) + eps)
        n_RD = y_RD * rstd_R[:, None]
        dy_RD = (dy_RD - n_RD * tl.sum(n_RD * dy_RD, axis=1)[:, None]) * rstd_R[:, None]
    dc_RD = dy_RD * sigmoid_RD * (1.0 + c_RD * (1.0 - sigmoid_RD))
    to_R = token_R.to(tl.int64) * CHANNELS
    written_RD = (token_R < num_tokens)[:, None] & (d_D < size)[None, :]
    tl.store(dc_ptr + to_R[:, None] + column_D[None, :], dc_RD.to(dc_ptr.dtype.element_ty), mask=written_RD)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])
def _conv_heads_backward_kernel(
    dc_ptr, x_ptr, weight_ptr, dx_ptr, partial_ptr, cu_seqlens_ptr, num_tokens, num_sequences, stride_x,
    CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """dx [T, C], and a part of the weight's gradient [taps, C], of every `PROGRAMS`-th tile of tokens."""
    program = tl.program_id(0)
    column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_column_C = column_C < CHANNELS
    for tap in tl.static_range(TAPS):
        tl.store(
            partial_ptr + (program * TAPS + tap) * CHANNELS + column_C, tl.zeros([BLOCK_C], tl.float32),
            mask=is_column_C,
        )  # fmt: skip
    for first in range(program * ROWS, num_tokens, PROGRAMS * ROWS):
        token_R = first + tl.arange(0, ROWS)
        _sequence_R, offset_R, length_R = _offsets_of(token_R, cu_seqlens_ptr, num_sequences, ROWS)
        inside_RC = ((offset_R < length_R) & (token_R < num_tokens))[:, None] & is_column_C[None, :]
        dx_RC = tl.zeros([ROWS, BLOCK_C], tl.float32)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            weight_C = tl.load(weight_ptr + column_C * TAPS + tap, mask=is_column_C, other=0.0).to(tl.float32)
            later_RC = inside_RC & (offset_R + back < length_R)[:, None]
            later_R = (token_R + back).to(tl.int64) * CHANNELS
            dc_RC = tl.load(dc_ptr + later_R[:, None] + column_C[None, :], mask=later_RC, other=0.0).to(tl.float32)
            dx_RC += dc_RC * weight_C[None, :]
            x_RC = tl.load(
                x_ptr + (token_R.to(tl.int64) * stride_x)[:, None] + column_C[None, :], mask=later_RC, other=0.0
            )  # fmt: skip
            part_C = partial_ptr + (program * TAPS + tap) * CHANNELS + column_C
            sum_C = tl.load(part_C, mask=is_column_C, other=0.0) + tl.sum(dc_RC * x_RC.to(tl.float32), 0)
            tl.store(part_C, sum_C, mask=is_column_C)
        to_R = token_R.to(tl.int64) * CHANNELS
        written_RC = (token_R < num_tokens)[:, None] & is_column_C[None, :]
        tl.store(dx_ptr + to_R[:, None] + column_C[None, :], dx_RC.to(dx_ptr.dtype.element_ty), mask=written_RC)


def _sizes(shape: DeltaShape) -> dict[str, int]:
    return {
        "KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads, "KEY_SIZE": shape.key_size,
        "VALUE_SIZE": shape.value_size, "TAPS": shape.taps,
        "BLOCK_D": triton.next_power_of_2(max(shape.key_size, shape.value_size)),
    }  # fmt: skip


def conv_heads_triton(
    x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, shape: DeltaShape, rows: SlotRows | None = None,
    state: DeltaState | None = None,
) -> Heads:  # fmt: skip
    """The forward's launcher."""
    num_tokens, num_sequences = len(x_TC), len(cu_seqlens_B1) - 1
    out = torch.empty(num_tokens * shape.channels, dtype=x_TC.dtype, device=x_TC.device)
    options, sizes = {"enable_fp_fusion": False} if x_TC.is_cuda else {}, _sizes(shape)
    slots: tuple[Tensor | None, ...] = (None, None, None)
    conv_rows, at_once = 1, False
    if rows is not None and state is not None:
        slots, conv_rows = (rows.slot_B, rows.first_position_B, state.conv), state.conv.shape[1]
        at_once = rows.max_seqlen <= conv_rows - 3 * (shape.taps - 1)  # no row is written that another one reads
    if num_tokens:
        _conv_heads_kernel[(triton.cdiv(num_tokens, ROWS), 2 * shape.key_heads + shape.value_heads)](
            x_TC, weight_C4, out, cu_seqlens_B1, *slots, num_tokens, num_sequences, x_TC.stride(0), conv_rows,
            shape.key_size**-0.5, EPS, **sizes, LEVELS=levels(sizes["BLOCK_D"]), ROWS=ROWS, SLOTS=rows is not None,
            STORE=at_once, ON_GPU=x_TC.is_cuda, num_warps=4, **options,
        )  # fmt: skip
        if rows is not None and not at_once:
            _store_conv_kernel[(num_sequences, triton.cdiv(shape.channels, 1024))](
                x_TC, cu_seqlens_B1, *slots, x_TC.stride(0), conv_rows, CHANNELS=shape.channels, BLOCK_C=1024,
                TAPS=shape.taps, **options,
            )  # fmt: skip
    keys = shape.key_heads * shape.key_size
    q, k, v = out.split([num_tokens * keys, num_tokens * keys, num_tokens * (shape.channels - 2 * keys)])
    of_keys = (num_tokens, shape.key_heads, shape.key_size)
    return Heads(q.view(of_keys), k.view(of_keys), v.view(num_tokens, shape.value_heads, shape.value_size))


def conv_heads_backward_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, shape: DeltaShape
) -> tuple[Tensor, Tensor]:
    """The backward's launcher."""
    num_tokens, num_sequences = len(x_TC), len(cu_seqlens_B1) - 1
    dc_TC, dx_TC = (torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device) for _ in range(2))
    partial_PTC = torch.empty(PROGRAMS, shape.taps * shape.channels, dtype=torch.float32, device=x_TC.device)
    counts = (cu_seqlens_B1, num_tokens, num_sequences, x_TC.stride(0))
    heads = 2 * shape.key_heads + shape.value_heads
    _conv_gradient_kernel[(max(1, triton.cdiv(num_tokens, ROWS)), heads)](
        *(gradient.contiguous() for gradient in (dq, dk, dv)), x_TC, weight_C4, dc_TC, *counts,
        shape.key_size**-0.5, EPS, **_sizes(shape), ROWS=ROWS, ON_GPU=x_TC.is_cuda, num_warps=4,
    )  # fmt: skip
    _conv_heads_backward_kernel[(PROGRAMS, triton.cdiv(shape.channels, 128))](
        dc_TC, x_TC, weight_C4, dx_TC, partial_PTC, *counts,
        CHANNELS=shape.channels, BLOCK_C=128, ROWS=GRADIENT_ROWS, TAPS=shape.taps, PROGRAMS=PROGRAMS, num_warps=4,
    )  # fmt: skip
    dweight_4C = sum_partials(partial_PTC, weight_C4.dtype).view(shape.taps, shape.channels)
    return dx_TC, dweight_4C.T.contiguous()


# ---------------------------------------------------------------- plain torch

PIECE = 256  # tokens


def conv_heads_reference(
    x_TC: Tensor,
    weight_C4: Tensor,
    cu_seqlens_B1: Tensor,
    shape: DeltaShape,
    rows: SlotRows | None = None,
    state: DeltaState | None = None,
) -> Heads:
    """The forward; with `rows` and `state` that of the engine."""
    offset_T, inside_T, sequence_T = _offsets(len(x_TC), cu_seqlens_B1)
    before_T = torch.zeros_like(offset_T)
    if rows is not None and state is not None:
        inside_T &= rows.slot_B[sequence_T] >= 0
        before_T = rows.first_position_B[sequence_T]
    c_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for tap in range(shape.taps):
        x_here = _shifted(x_TC, offset_T, shape.taps - 1 - tap)
        if rows is not None and state is not None:
            position_T = before_T + offset_T - (shape.taps - 1 - tap)
            kept_TC = state.conv[rows.slot_B[sequence_T], _row_of(position_T, state, shape)]
            from_slot_T = (offset_T < shape.taps - 1 - tap) & (position_T >= 0)
            x_here = torch.where(from_slot_T[:, None], kept_TC, x_here)
        c_TC = c_TC + x_here.float() * weight_C4[:, tap].float()
    if rows is not None and state is not None:
        position_T = before_T + offset_T
        end_T = before_T + (cu_seqlens_B1[1:] - cu_seqlens_B1[:-1]).long()[sequence_T]
        behind_T = (end_T - 1) // CHUNK * CHUNK - position_T  # how far it lies before the last chunk
        stored_T = position_T >= end_T - (state.conv.shape[1] - 2 * (shape.taps - 1))
        stored_T |= (behind_T > 0) & (behind_T < shape.taps)
        stored_T &= inside_T
        row_T = _row_of(position_T, state, shape)
        state.conv[rows.slot_B[sequence_T][stored_T], row_T[stored_T]] = x_TC[stored_T]
    for rows_C in c_TC.split(PIECE):  # float64 takes much memory
        rows_C.copy_(silu(rows_C.double()))
    y_TC = c_TC.mul_(inside_T[:, None])
    q, k, v = _split(y_TC, shape)
    parts = _normalized(q) * shape.key_size**-0.5, _normalized(k), v
    return Heads(*(part.to(x_TC.dtype).contiguous() for part in parts))


def conv_heads_backward_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, shape: DeltaShape
) -> tuple[Tensor, Tensor]:
    """The backward, float32."""
    offset_T, inside_T, _ = _offsets(len(x_TC), cu_seqlens_B1)
    taps = [_shifted(x_TC, offset_T, shape.taps - 1 - tap).float() for tap in range(shape.taps)]
    weight_C4 = weight_C4.float()
    c_TC = torch.stack([x_here * weight_C4[:, tap] for tap, x_here in enumerate(taps)]).sum(0)
    sigmoid_TC = c_TC.sigmoid()
    q, k, _ = _split(c_TC * sigmoid_TC, shape)
    parts = (_unnormalized(dq.float() * shape.key_size**-0.5, q), _unnormalized(dk.float(), k), dv.float())
    dc_TC = torch.cat([part.flatten(1) for part in parts], 1) * inside_T[:, None]
    dc_TC = dc_TC * sigmoid_TC * (1.0 + c_TC * (1.0 - sigmoid_TC))
    dx_TC = torch.zeros_like(c_TC)
    for tap in range(shape.taps):
        back = shape.taps - 1 - tap
        reaches_T = offset_T >= back
        at_T = torch.arange(len(x_TC), device=x_TC.device)[reaches_T] - back
        dx_TC.index_add_(0, at_T, dc_TC[reaches_T] * weight_C4[:, tap])
    dweight_C4 = torch.stack([(dc_TC * x_here).sum(0) for x_here in taps], 1)
    return dx_TC.to(x_TC.dtype), dweight_C4.to(x_TC.dtype)


def _offsets(num_tokens: int, cu_seqlens_B1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: how far it lies behind its sequence's first row, whether it is in a sequence, and in which."""
    token_T = torch.arange(num_tokens, device=cu_seqlens_B1.device)
    sequence_T = torch.searchsorted(cu_seqlens_B1[1:].contiguous(), token_T.to(cu_seqlens_B1.dtype), right=True)
    inside_T = sequence_T < len(cu_seqlens_B1) - 1
    sequence_T = sequence_T.clamp(max=len(cu_seqlens_B1) - 2)
    return token_T - cu_seqlens_B1[sequence_T].long(), inside_T, sequence_T


def _row_of(position_T: Tensor, state: DeltaState, shape: DeltaShape) -> Tensor:
    """The row of a slot's `conv` that belongs to each position."""
    ring = state.conv.shape[1] - 2 * (shape.taps - 1)
    of_end_T = position_T % CHUNK - (CHUNK - shape.taps + 1)
    at_end_T = ring + position_T // CHUNK % 2 * (shape.taps - 1) + of_end_T
    return torch.where(of_end_T >= 0, at_end_T, position_T % ring)


def _shifted(x_TC: Tensor, offset_T: Tensor, back: int) -> Tensor:
    """The row `back` rows before each; zero before the sequence's first."""
    at_T = torch.arange(len(x_TC), device=x_TC.device) - back
    return torch.where((offset_T >= back)[:, None], x_TC[at_T.clamp(min=0)], 0.0)


def _split(x_TC: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    keys = shape.key_heads * shape.key_size
    q, k, v = x_TC.split([keys, keys, shape.value_heads * shape.value_size], 1)
    key_sizes = (-1, shape.key_heads, shape.key_size)
    return q.reshape(key_sizes), k.reshape(key_sizes), v.reshape(-1, shape.value_heads, shape.value_size)


def _rstd(y: Tensor) -> Tensor:
    sum_of_squares = y.double().square().sum(-1, keepdim=True).float()
    return (sum_of_squares + EPS).double().rsqrt().float()


def _normalized(y: Tensor) -> Tensor:
    return y * _rstd(y)


def _unnormalized(dn: Tensor, y: Tensor) -> Tensor:
    """The gradient of y, from that of y rstd."""
    rstd = _rstd(y)
    n = y * rstd
    return rstd * (dn - n * (n * dn).sum(-1, keepdim=True))
