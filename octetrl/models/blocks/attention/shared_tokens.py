"""Attention over a micro-batch that several workers share (layers/token_group.py).

Q, K and V of own tokens, after rotation and the cache's quantiser, go to the workers that have their heads. There the
kernels of `attention_packed` run over all tokens, and the output comes back. The backward goes the same ways.

t own tokens, T all, H query heads, K kv heads of all workers, h query heads of this one, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octetrl.kernels.attention.attention_packed import (
    attention_packed_backward,
    attention_packed_forward_reference,
    attention_packed_forward_triton,
)
from octetrl.kernels.attention.kv_store import ReplayedKV, kv_replay
from octetrl.kernels.attention.records import Replay
from octetrl.kernels.attention.sink_gradient import sink_gradient
from octetrl.layers.context import PackedContext
from octetrl.layers.token_group import TokenGroup


def attention_shared(
    q_tHD: Tensor,
    k_tKD: Tensor,
    v_tKD: Tensor,
    context: PackedContext,
    softmax_scale: float,
    replay: Replay,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """`attention_packed` for own tokens, [t, H, D]."""
    out_tHD: Tensor = _AttentionShared.apply(q_tHD, k_tKD, v_tKD, sinks_H, context, softmax_scale, replay, window)
    return out_tHD


def shared_forward(
    q_tHD: Tensor,
    kv: ReplayedKV,
    context: PackedContext,
    softmax_scale: float,
    window: int | None,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The output of own tokens [t, H, D], and lse2 of own heads [T, h]."""
    group = _group_of(context)
    forward = attention_packed_forward_triton if q_tHD.is_cuda else attention_packed_forward_reference
    bounds, sinks_h = (context.cu_seqlens_B1, context.max_seqlen), _own(group, sinks_H)
    out_ThD, lse2_Th = forward(group.to_heads(q_tHD), _to_heads(group, kv), *bounds, softmax_scale, window, sinks_h)
    return group.to_tokens(out_ThD, q_tHD.shape[1]), lse2_Th


def shared_backward(
    dout_tHD: Tensor,
    q_tHD: Tensor,
    kv: ReplayedKV,
    out_tHD: Tensor,
    lse2_Th: Tensor,
    context: PackedContext,
    softmax_scale: float,
    window: int | None,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dQ, dK and dV of own tokens, and the gradient of own heads' sinks [H], zero elsewhere."""
    group, num_heads, num_kv_heads = _group_of(context), q_tHD.shape[1], kv.k_TKD.shape[1]
    dout_ThD, q_ThD, out_ThD = (group.to_heads(x_tHD) for x_tHD in (dout_tHD, q_tHD, out_tHD))
    dsinks_H = None if sinks_H is None else torch.zeros_like(sinks_H)
    if sinks_H is not None and dsinks_H is not None:
        own = group.heads(num_heads)
        dsinks_H[own] = sink_gradient(dout_ThD, out_ThD, lse2_Th, sinks_H[own])
    dq_ThD, *of_kv = attention_packed_backward(
        dout_ThD,
        q_ThD,
        _to_heads(group, kv),
        out_ThD,
        lse2_Th,
        context.cu_seqlens_B1,
        context.max_seqlen,
        softmax_scale,
        window,
        torch.float32 if num_kv_heads < group.workers.size else None,
    )
    dk_tKD, dv_tKD = (group.to_tokens(each, num_kv_heads).to(q_tHD.dtype) for each in of_kv)
    return group.to_tokens(dq_ThD, num_heads), dk_tKD, dv_tKD, dsinks_H


class _AttentionShared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_tHD: Tensor,
        k_tKD: Tensor,
        v_tKD: Tensor,
        sinks_H: Tensor | None,
        context: PackedContext,
        softmax_scale: float,
        replay: Replay,
        window: int | None,
    ) -> Tensor:
        kv = kv_replay(k_tKD, v_tKD, replay)
        out_tHD, lse2_Th = shared_forward(q_tHD, kv, context, softmax_scale, window, sinks_H)
        ctx.save_for_backward(q_tHD, *kv, out_tHD, lse2_Th, sinks_H)
        ctx.settings = context, softmax_scale, window
        return out_tHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_tHD, *kv, out_tHD, lse2_Th, sinks_H = ctx.saved_tensors
        context, softmax_scale, window = ctx.settings
        saved = ReplayedKV(*kv), out_tHD, lse2_Th
        found = shared_backward(grads[0], q_tHD, *saved, context, softmax_scale, window, sinks_H)
        return (*found, None, None, None, None)


def _group_of(context: PackedContext) -> TokenGroup:
    assert context.group is not None, "one worker has all tokens"
    return context.group


def _own(group: TokenGroup, of_heads_H: Tensor | None) -> Tensor | None:
    return None if of_heads_H is None else of_heads_H[group.heads(len(of_heads_H))]


def _to_heads(group: TokenGroup, kv: ReplayedKV) -> ReplayedKV:
    """All tokens of own KV heads. Scales of heads are cut, those of tokens go with them."""
    scales = (one if one is None or one.dim() == 2 else _own(group, one) for one in (kv.k_scale, kv.v_scale))
    k_scale, v_scale = (one if one is None or one.dim() == 1 else group.to_heads(one) for one in scales)
    return ReplayedKV(group.to_heads(kv.k_TKD), group.to_heads(kv.v_TKD), k_scale, v_scale)
