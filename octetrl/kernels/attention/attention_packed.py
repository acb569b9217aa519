"""Causal attention of packed training sequences: forward in the engine's order, with KV replay, and its backward.

    out[t] = sum over keys j <= t of the same sequence of softmax_j(softmax_scale * q[t] k[j]) * v[j]

Forward: `kv_replay` passes K and V through the quantiser of the rollout's cache. Every query row then processes its
keys in the order of `attention_order`. The attention output of a trained token has the bits that the engine computed
when it sampled that token.

Backward: it needs no equal bits, so its operands are float32 or BF16. It is deterministic, because it has no atomics. P
is recomputed from lse2:

    delta = sum(dO * O)       P = exp2(s - lse2)        dP = dO V'^T         dS = P * (dP - delta)
    dV = P^T dO               dQ = softmax_scale * dS K'                     dK = softmax_scale * dS^T Q

K' and V' are the dequantised K and V, as the forward used them. Their gradient is taken as the gradient of the original
K and V (straight-through), also for clamped values. A sink is part of lse2; its own gradient is sink_gradient.py.

B sequences, T tokens, H query heads, K kv heads, D head size; J, M, S, G as in `attention_order`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octetrl.kernels.attention.attention_order import LOG2E
from octetrl.kernels.attention.attention_packed_backward import padded_backward_triton
from octetrl.kernels.attention.attention_reference import (
    KVRows,
    PaddedGroup,
    attend_reference,
    fold_heads,
    fold_positions,
    hidden_keys,
    pieces,
    query_blocks,
    unfold_heads,
)
from octetrl.kernels.attention.attention_rows import attention_packed_forward_triton
from octetrl.kernels.attention.kv_store import ReplayedKV, kv_replay
from octetrl.kernels.attention.records import Replay
from octetrl.kernels.attention.sink_gradient import sink_gradient

NO_REPLAY = Replay()


def attention_packed(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    replay: Replay = NO_REPLAY,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention within each of the sequences that `cu_seqlens_B1` (int32) bounds. Differentiable in q, k, v.

    q_THD, k_TKD, v_TKD: BF16 (or float32 on a CPU). `replay`: as in `kv_replay`. `window`: a token reads so many keys,
    its own included; None: all before it. `sinks_H`: each head's sink, differentiable.

    Returns [T, H, D] in q's dtype. Rows past `cu_seqlens_B1[-1]` are zero.
    """
    out_THD: Tensor = _AttentionPacked.apply(
        q_THD, k_TKD, v_TKD, sinks_H, cu_seqlens_B1, max_seqlen, softmax_scale, replay, window
    )
    return out_THD


def attention_packed_forward(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    replay: Replay = NO_REPLAY,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward only: out [T, H, D] and lse2 [T, H], the float32 log-sum-exp in base 2."""
    kv = kv_replay(k_TKD, v_TKD, replay)
    return _forward(q_THD, kv, cu_seqlens_B1, max_seqlen, softmax_scale, window)


def attention_packed_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    kv: ReplayedKV,
    out_THD: Tensor,
    lse2_TH: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [T, H, D], dK and dV [T, K, D] from the forward's inputs and outputs. Zero outside every sequence.
    `kv_dtype`: of dK and dV; None: that of q."""
    arguments = (dout_THD, q_THD, kv, out_THD, lse2_TH, cu_seqlens_B1, max_seqlen, softmax_scale, window, kv_dtype)
    if not q_THD.is_cuda:
        return attention_packed_backward_reference(*arguments)
    return padded_backward_triton(*arguments)


def _forward(q_THD: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    forward = attention_packed_forward_triton if q_THD.is_cuda else attention_packed_forward_reference
    return forward(q_THD, *arguments)


class _AttentionPacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        sinks_H: Tensor | None,
        cu_seqlens_B1: Tensor,
        max_seqlen: int,
        softmax_scale: float,
        replay: Replay,
        window: int | None,
    ) -> Tensor:
        kv = kv_replay(k_TKD, v_TKD, replay)
        out_THD, lse2_TH = _forward(q_THD, kv, cu_seqlens_B1, max_seqlen, softmax_scale, window, sinks_H)
        ctx.save_for_backward(q_THD, *kv, out_THD, lse2_TH, cu_seqlens_B1, sinks_H)
        ctx.settings = (max_seqlen, softmax_scale, window)
        return out_THD

    @staticmethod
    def backward(ctx: Any, dout_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, *kv, out_THD, lse2_TH, cu_seqlens_B1, sinks_H = ctx.saved_tensors
        saved = (dout_THD, q_THD, ReplayedKV(*kv), out_THD, lse2_TH, cu_seqlens_B1)
        dsinks_H = sink_gradient(dout_THD, out_THD, lse2_TH, sinks_H) if ctx.needs_input_grad[3] else None
        return (*attention_packed_backward(*saved, *ctx.settings), dsinks_H, *[None] * 5)


# ---------------------------------------------------------------- plain torch


def attention_packed_forward_reference(
    q_THD: Tensor,
    kv: ReplayedKV,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward by the CPU form of `attention_order`."""
    cu_seqlens, lengths = _lengths(cu_seqlens_B1)
    assert max(lengths, default=0) <= max_seqlen, f"a sequence has {max(lengths)} tokens, max_seqlen is {max_seqlen}"
    num_kv_heads = kv.k_TKD.shape[1]
    rows_of = _packed_rows(cu_seqlens_B1, num_kv_heads)
    sequences = (rows_of, cu_seqlens, lengths)
    return attend_reference(q_THD, _tables(kv), *sequences, softmax_scale, num_kv_heads, window, sinks_H)


def attention_packed_backward_reference(
    dout_THD: Tensor,
    q_THD: Tensor,
    kv: ReplayedKV,
    out_THD: Tensor,
    lse2_TH: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    window: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV, computed in float32 from the dequantised K and V."""
    T, H, D = q_THD.shape
    K = kv.k_TKD.shape[1]
    cu_seqlens, lengths = _lengths(cu_seqlens_B1)
    rows_of = _packed_rows(cu_seqlens_B1, K)
    k_ND = _dequantized(kv.k_TKD, kv.k_scale)
    v_ND = _dequantized(kv.v_TKD, kv.v_scale)
    delta_TH = (dout_THD.float() * out_THD.float()).sum(-1)
    dq_THD = torch.zeros(T, H, D)
    dk_ND, dv_ND = torch.zeros(T * K, D), torch.zeros(T * K, D)
    for piece in pieces(cu_seqlens, lengths, H, D):
        J = len(piece.sequence_J)
        row_JKS = rows_of(piece)
        k_NSD, v_NSD = k_ND[row_JKS].flatten(0, 1), v_ND[row_JKS].flatten(0, 1)
        dk_NSD, dv_NSD = torch.zeros_like(k_NSD), torch.zeros_like(v_NSD)
        for block, num_keys in query_blocks(piece):
            query_JM = piece.query_JM[:, block]
            q, dout = (fold_heads(x[query_JM].float(), K) for x in (q_THD, dout_THD))
            lse2, delta = (fold_heads(x[query_JM][..., None], K) for x in (lse2_TH, delta_TH))
            position_NR = fold_positions(torch.where(piece.valid_JM, piece.position_JM, -1)[:, block], K, H // K)
            k, v = k_NSD[:, :num_keys], v_NSD[:, :num_keys]
            hidden = hidden_keys(torch.arange(num_keys), position_NR, window)
            p = torch.bmm(q, k.mT).mul_(softmax_scale * LOG2E).sub_(lse2).masked_fill_(hidden, -math.inf).exp2_()
            dv_NSD[:, :num_keys].baddbmm_(p.mT, dout)
            ds = p.mul_(torch.bmm(dout, v.mT).sub_(delta)).mul_(softmax_scale)
            dk_NSD[:, :num_keys].baddbmm_(ds.mT, q)
            piece.scatter(dq_THD, unfold_heads(torch.bmm(ds, k), J, query_JM.shape[1]), block.start)
        owned_JKS = piece.valid_JM[:, None].expand_as(row_JKS)
        dk_ND[row_JKS[owned_JKS]] = dk_NSD.view(*row_JKS.shape, D)[owned_JKS]
        dv_ND[row_JKS[owned_JKS]] = dv_NSD.view(*row_JKS.shape, D)[owned_JKS]
    dk_TKD, dv_TKD = (x_ND.view(T, K, D).to(kv_dtype or q_THD.dtype) for x_ND in (dk_ND, dv_ND))
    return dq_THD.to(q_THD.dtype), dk_TKD, dv_TKD


def _lengths(cu_seqlens_B1: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bounds = cu_seqlens_B1.tolist()
    return tuple(bounds), tuple(end - start for start, end in itertools.pairwise(bounds))


def _packed_rows(cu_seqlens_B1: Tensor, num_kv_heads: int) -> Callable[[PaddedGroup], Tensor]:
    """The rows of a piece's keys in K and V, viewed as tables [T * K, D]."""

    def rows_of(piece: PaddedGroup) -> Tensor:
        token_JS = cu_seqlens_B1[piece.sequence_J, None].long() + piece.key_JS
        return token_JS[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]

    return rows_of


def _tables(kv: ReplayedKV) -> KVRows:
    D = kv.k_TKD.shape[-1]
    return KVRows(kv.k_TKD.reshape(-1, D), kv.v_TKD.reshape(-1, D), kv.k_scale, kv.v_scale)


def _dequantized(x_TKD: Tensor, scale: Tensor | None) -> Tensor:
    """float32 values [T * K, D] of codes in the operand dtype."""
    x_TKD = x_TKD.float()
    if scale is not None:
        x_TKD = x_TKD * scale[..., None]  # [K] or [T, K]
    return x_TKD.reshape(-1, x_TKD.shape[-1])
