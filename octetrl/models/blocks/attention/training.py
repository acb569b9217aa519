"""Attention's fused form for training on a GPU: forward and backward.

    qkv = n Wqkv;  q, k, v = rotate(qkv);  out = attention(q, k, v);  result = out Wo
    dq, dk, dv = attention'(dresult Wo^T);  dWo = dresult^T out
    dqkv = rotate'(dq, dk, dv);  dn = dqkv Wqkv^T;  dWqkv = dqkv^T n

`rotate` is QK-norm and RoPE; K and V also pass through the cache's quantiser. Saved: wgrad's operand of n, and qkv.
Costly: out and its log-sum-exp. If they are recomputed, the backward also has q, k, v. Otherwise it rotates qkv again.

T tokens, E hidden size, H query heads, K kv heads, D head size, Q = H * D, X = (H + 2 K) D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.kernels.attention.attention_packed import attention_packed_backward
from octetrl.kernels.attention.attention_rows import attention_packed_forward_triton
from octetrl.kernels.attention.kv_store import ReplayedKV
from octetrl.kernels.attention.qkv_rotate import qkv_rotate
from octetrl.kernels.attention.qkv_rotate_backward import qkv_rotate_backward
from octetrl.kernels.attention.records import Replay
from octetrl.kernels.attention.sink_gradient import sink_gradient
from octetrl.kernels.profiler_parts import part
from octetrl.models.blocks.attention.as_cached import values_of
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.blocks.attention.shared_tokens import shared_backward, shared_forward
from octetrl.models.blocks.block import TrainingInputs
from octetrl.models.blocks.products import Input, Operand, dgrad, gradient_of, input_of, product, wgrad, wgrad_input
from octetrl.models.blocks.saved import Gradients, Saved


class Attended(NamedTuple):
    out_TQ: Tensor
    lse2_TH: Tensor


@dataclass(slots=True)
class SavedAttention(Saved):
    """`costly` is `Attended`; `made_with_costly` is the result of `_rotated`."""

    n: Operand
    qkv_TX: Tensor
    inputs: TrainingInputs


def begin(
    attention: Attention, n: Input, inputs: TrainingInputs, *, costly: Attended | None, observe: bool
) -> SavedAttention:
    """`observe`: collects the amax of K and V."""
    qkv_TX = product(attention.qkv_proj, n)
    rotated = None
    if costly is None:
        costly, rotated = attend(attention, qkv_TX, inputs, observe)
        if attention.probe is not None:
            attention.probe(attention.layer, "qkv_proj", qkv_TX)
    return SavedAttention(n=n.for_backward, qkv_TX=qkv_TX, inputs=inputs, costly=costly, made_with_costly=rotated)


def attend(
    attention: Attention, qkv_TX: Tensor, inputs: TrainingInputs, observe: bool
) -> tuple[Attended, tuple[Tensor, ReplayedKV]]:
    """Attention over q, k and v, contiguous, and what `_rotated` gave."""
    rotated = q_THD, kv = _rotated(attention, qkv_TX, inputs, observe)
    context, scale, others = inputs.context, attention.softmax_scale, (attention.window, attention.sinks)
    with part("attention_forward"):
        if context.group is None:
            bounds = context.cu_seqlens_B1, context.max_seqlen
            out_THD, lse2_TH = attention_packed_forward_triton(q_THD, kv, *bounds, scale, *others)
        else:
            out_THD, lse2_TH = shared_forward(q_THD, kv, context, scale, *others)
    if attention.probe is not None:
        k_TKD, v_TKD = values_of(kv)
        attention.probe(attention.layer, "rotated q", q_THD)
        attention.probe(attention.layer, "k as cached", k_TKD)
        attention.probe(attention.layer, "v as cached", v_TKD)
        attention.probe(attention.layer, "attention out", out_THD)
    return Attended(out_THD.flatten(1), lse2_TH), rotated


def finish(attention: Attention, saved: SavedAttention) -> Tensor:
    with part("quantize"):
        out = input_of(attention.o_proj, saved.costly.out_TQ, for_wgrad=False)
    out_TE = product(attention.o_proj, out)
    if attention.probe is not None:
        attention.probe(attention.layer, "attention out", out.rows)
        attention.probe(attention.layer, "o_proj", out_TE)
    return out_TE


def backward(attention: Attention, saved: SavedAttention, dout_TE: Tensor, gradients: Gradients) -> Tensor:
    qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
    with part("quantize"):
        dout = gradient_of(o_proj, dout_TE)
        out = wgrad_input(o_proj, saved.costly.out_TQ)
    dout_TQ = dgrad(o_proj, dout)
    wgrad(gradients, "o_proj", o_proj, dout, out)
    del dout, out
    if o_proj.bias is not None and o_proj.bias.requires_grad:
        gradients["o_proj.bias"] = dout_TE.sum(0, dtype=torch.float32).to(o_proj.bias.dtype)
    dqkv_TXD = attend_backward(attention, saved, saved.qkv_TX, dout_TQ, gradients)
    with part("quantize"):
        dqkv = gradient_of(qkv_proj, dqkv_TXD.flatten(1))
    dn_TE = dgrad(qkv_proj, dqkv)
    wgrad(gradients, "qkv_proj", qkv_proj, dqkv, saved.n)
    if qkv_proj.bias is not None and qkv_proj.bias.requires_grad:
        gradients["qkv_proj.bias"] = dqkv_TXD.flatten(1).sum(0, dtype=torch.float32).to(qkv_proj.bias.dtype)
    return dn_TE


def attend_backward(
    attention: Attention, saved: SavedAttention, qkv_TX: Tensor, dout_TQ: Tensor, gradients: Gradients
) -> Tensor:
    """The gradient [T, H + 2 K, D] of q, k and v, from that of attention's output. Adds those of QK-norm and sinks."""
    context = saved.inputs.context
    out_TQ, lse2_TH = saved.costly
    sinks = attention.sinks if attention.sinks is not None and attention.sinks.requires_grad else None
    rotated, saved.made_with_costly = saved.made_with_costly, None
    q_THD, kv = rotated or _rotated(attention, qkv_TX, saved.inputs, observe=False)
    operands = dout_TQ.view(q_THD.shape), q_THD, kv, out_TQ.view(q_THD.shape), lse2_TH
    scale, window = attention.softmax_scale, attention.window
    with part("attention_backward"):
        if context.group is None:
            bounds = context.cu_seqlens_B1, context.max_seqlen
            dsinks_H = None if sinks is None else sink_gradient(operands[0], *operands[3:], sinks)
            dq_THD, dk_TKD, dv_TKD = attention_packed_backward(*operands, *bounds, scale, window)
        else:
            dq_THD, dk_TKD, dv_TKD, dsinks_H = shared_backward(*operands, context, scale, window, sinks)
    gradients["sinks"] = dsinks_H
    del rotated, operands, q_THD, kv, dout_TQ
    qkv_TXD = qkv_TX.view(len(qkv_TX), -1, attention.head_size)
    with part("rows"):
        rotation = attention.rotation(*saved.inputs.rotary)
        dqkv_TXD, dq_norm_D, dk_norm_D = qkv_rotate_backward(dq_THD, dk_TKD, dv_TKD, qkv_TXD, rotation)
    gradients["q_norm.weight"], gradients["k_norm.weight"] = dq_norm_D, dk_norm_D
    return dqkv_TXD


def _rotated(attention: Attention, qkv_TX: Tensor, inputs: TrainingInputs, observe: bool) -> tuple[Tensor, ReplayedKV]:
    """Q as attention's operand, and K and V as in the rollout's cache."""
    context, num_kv_heads = inputs.context, attention.num_kv_heads
    k_scale_K, v_scale_K = attention.scales_of(context.kv_scale_LS)
    replay = Replay(context.kv_mode, k_scale_K, v_scale_K, attention.quantized)
    amax_LS = context.kv_amax_LS if observe else None
    with part("rows"):
        return qkv_rotate(
            qkv_TX.view(qkv_TX.shape[0], -1, attention.head_size),
            attention.rotation(*inputs.rotary),
            num_kv_heads,
            replay,
            None if amax_LS is None else amax_LS[attention.layer, : 2 * num_kv_heads].view(2, -1),
        )
