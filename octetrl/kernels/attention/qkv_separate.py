"""`qkv_store`, `qkv_rotate` and its backward as one kernel after the other, where the fused kernels don't fit.

The fused kernels hold both halves of a head in registers and add a head's squares in `rms_norm`'s tree. Both need a
head size that is a power of two, and RoPE that rotates the whole head. For heads of 80, 96 and 192, and where RoPE
rotates a part of each head, these functions call the kernels that the fused ones replace: `rms_norm`, `rope`,
`kv_store` or `kv_replay`. Rollout and training therefore still compute the same bits. They read and write Q and K up to
three times instead of once.

T tokens, H query heads, K kv heads, X = H + 2K, D head size, S positions of the table, R <= D/2 planes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.kernels.attention.kv_store import ReplayedKV, kv_replay_triton, kv_store_triton
from octetrl.kernels.rows.rms_norm import rms_norm_triton
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward_triton
from octetrl.kernels.rows.rope import rope_triton
from octetrl.shapes.blocks import KVMode, KVTensors


def is_fused(head_size: int, planes: int | None = None) -> bool:
    """Whether the fused kernels take heads of this size. `planes`: of RoPE's table; None: those of the whole head."""
    return head_size & (head_size - 1) == 0 and planes in (None, head_size // 2)


def qkv_store_separate(
    qkv_TX: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_SR: Tensor,
    sin_SR: Tensor,
    positions_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    saturated_2K: Tensor | None = None,
) -> Tensor:
    """`qkv_store`. No host reads, so it can be part of a captured graph."""
    kv_heads, size = k_cache.shape[1], k_cache.shape[3]
    qkv_TXD = qkv_TX.view(qkv_TX.shape[0], -1, size)
    cos_TR, sin_TR = cos_SR.index_select(0, positions_T), sin_SR.index_select(0, positions_T)
    num_heads = qkv_TXD.shape[1] - 2 * kv_heads
    q_THD, k_TKD, v_TKD = _rotated(qkv_TXD, q_norm_D, k_norm_D, eps, cos_TR, sin_TR, num_heads, kv_heads)
    scales = (k_scale_K, v_scale_K, k_token_scale, v_token_scale, saturated_2K)
    kv_store_triton(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, *scales)
    return q_THD


def qkv_rotate_separate(
    qkv_TXD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    num_heads: int,
    num_kv_heads: int,
    kv_mode: KVMode,
    quantized: KVTensors,
    k_scale_K: Tensor | None,
    v_scale_K: Tensor | None,
    amax_2K: Tensor | None,
) -> tuple[Tensor, ReplayedKV]:
    """`qkv_rotate`, with its arguments in the order of its launcher."""
    q_THD, k_TKD, v_TKD = _rotated(qkv_TXD, q_weight_D, k_weight_D, eps, cos_TR, sin_TR, num_heads, num_kv_heads)
    if amax_2K is not None and qkv_TXD.shape[0]:
        for amax_K, x_TKD in zip(amax_2K, (k_TKD, v_TKD), strict=True):
            observed_K = torch.linalg.vector_norm(x_TKD, ord=float("inf"), dim=(0, 2))
            torch.maximum(amax_K, observed_K.float(), out=amax_K)
    if kv_mode == "none":
        return q_THD, ReplayedKV(k_TKD, v_TKD, None, None)
    return q_THD, kv_replay_triton(k_TKD, v_TKD, kv_mode, k_scale_K, v_scale_K, quantized)


def qkv_rotate_backward_separate(
    dq_THD: Tensor,
    dk_TKD: Tensor,
    dv_TKD: Tensor,
    qkv_TXD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`qkv_rotate_backward`. The gradient stays float32 between RoPE and QK-norm and is rounded once."""
    split = (dq_THD.shape[1], dk_TKD.shape[1], dv_TKD.shape[1])
    dqkv_TXD = torch.empty(qkv_TXD.shape, dtype=qkv_TXD.dtype, device=qkv_TXD.device)
    dweights: list[Tensor | None] = []
    gradients, inputs = dqkv_TXD.split(split, dim=1), qkv_TXD.split(split, dim=1)
    of_q_and_k = zip(gradients, (dq_THD, dk_TKD), inputs, (q_weight_D, k_weight_D), strict=False)
    for gradient_THD, dy_THD, x_THD, weight_D in of_q_and_k:
        dx_THD, dweight_D = rope_triton(dy_THD.float(), cos_TR, sin_TR, -1), None
        if weight_D is not None:
            dx_THD, dweight_D = rms_norm_backward_triton(dx_THD, x_THD.float(), weight_D, eps)
        gradient_THD.copy_(dx_THD)
        dweights.append(dweight_D)
    gradients[2].copy_(dv_TKD)
    return dqkv_TXD, dweights[0], dweights[1]


def _rotated(
    qkv_TXD: Tensor,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    num_heads: int,
    num_kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after QK-norm and RoPE, contiguous, and v, a view."""
    q_THD, k_TKD, v_TKD = qkv_TXD.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight_D is not None and k_weight_D is not None:
        q_THD, k_TKD = rms_norm_triton(q_THD, q_weight_D, eps), rms_norm_triton(k_TKD, k_weight_D, eps)
    return rope_triton(q_THD, cos_TR, sin_TR, 1), rope_triton(k_TKD, cos_TR, sin_TR, 1), v_TKD
