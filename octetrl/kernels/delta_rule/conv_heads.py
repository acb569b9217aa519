"""The causal convolution of gated DeltaNet, and from it the heads of q, k and v.

    c_t = w_0 x_{t-3} + w_1 x_{t-2} + w_2 x_{t-1} + w_3 x_t        of each channel, added in this order, float32
    y   = c sigmoid(c)
    v   = round(y)      k = round(y / sqrt(sum y^2 + 1e-6))      q = round(k's formula / sqrt(K))

Rows before a sequence's first one are zero. In the engine they are read from the slot's `conv` if their position is not
negative, and the new rows are written there. The sum of squares is one fixed tree of one head in one program, whatever
the number of rows; the CPU form sums in float64, and computes the sigmoid in float64, as silu_mul.py does.

The backward recomputes c. With s = sigmoid(c) and n = y rstd, dy = rstd (dn - n (n . dn)), dc = dy s (1 + c (1 - s)):

    dx_t = sum_j w_{3-j} dc_{t+j}      dw_j = sum_t dc_t x_{t-3+j}

T tokens, C channels (q, then k, then v), D size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from octetrl.kernels.delta_rule.state import DeltaState, SlotRows
from octetrl.shapes.delta_rule import DeltaShape

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
    return conv_heads_reference(x_TC, weight_C4, rows.cu_seqlens_B1, shape, rows, state)


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int, shape: DeltaShape
    ) -> Heads:
        ctx.save_for_backward(x_TC, weight_C4, cu_seqlens_B1)
        ctx.settings = (max_seqlen, shape)
        return conv_heads_reference(x_TC, weight_C4, cu_seqlens_B1, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*conv_heads_backward(*gradients, *ctx.saved_tensors, *ctx.settings), None, None, None)


def conv_heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x_TC: Tensor, weight_C4: Tensor, cu_seqlens_B1: Tensor, max_seqlen: int,
    shape: DeltaShape,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx [T, C], contiguous, and dweight [C, 4], in their dtypes."""
    return conv_heads_backward_reference(dq, dk, dv, x_TC, weight_C4, cu_seqlens_B1, shape)


# ---------------------------------------------------------------- plain torch


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
            kept_TC = state.conv[rows.slot_B[sequence_T], position_T % state.conv.shape[1]]
            from_slot_T = (offset_T < shape.taps - 1 - tap) & (position_T >= 0)
            x_here = torch.where(from_slot_T[:, None], kept_TC, x_here)
        c_TC = c_TC + x_here.float() * weight_C4[:, tap].float()
    if rows is not None and state is not None:
        end_T = cu_seqlens_B1[1:].long()[sequence_T] - cu_seqlens_B1[sequence_T].long()
        stored_T = inside_T & (offset_T >= end_T - state.conv.shape[1])
        position_T = (before_T + offset_T) % state.conv.shape[1]
        state.conv[rows.slot_B[sequence_T][stored_T], position_T[stored_T]] = x_TC[stored_T]
    y_TC = silu(c_TC.double()).float() * inside_T[:, None]
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
