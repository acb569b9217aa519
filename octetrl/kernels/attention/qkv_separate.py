"""`qkv_store`, `qkv_rotate` and its backward as one kernel after the other, where the fused kernels don't fit.

The fused kernels hold both halves of a head in registers and add a head's squares in `rms_norm`'s tree. Both need a
head size that is a power of two, and RoPE that rotates the whole head. For heads of 80, 96 and 192, and where RoPE
rotates a part of each head, these functions call the kernels that the fused ones replace: `rms_norm`, `rope`,
`kv_store` or `kv_replay`. Rollout and training therefore still compute the same bits. They read and write Q and K up to
three times instead of once.

T tokens, H query heads, K kv heads, X = H + 2K, D head size, S positions of the table, R <= D/2 planes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octetrl.kernels.attention.kv_store import ReplayedKV, kv_replay_triton, kv_store_triton
from octetrl.kernels.attention.records import CachedPages, Replay, Rotation
from octetrl.kernels.rows.rms_norm import rms_norm_triton
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward_triton
from octetrl.kernels.rows.rope import rope_triton


def is_fused(head_size: int, planes: int | None = None) -> bool:
    """Whether the fused kernels take heads of this size. `planes`: of RoPE's table; None: those of the whole head."""
    return head_size & (head_size - 1) == 0 and planes in (None, head_size // 2)


def check_norms(rotation: Rotation) -> None:
    assert (rotation.q_norm_D is None) == (rotation.k_norm_D is None), "only one of q and k has a norm weight"


def check_angles(rotation: Rotation, num_tokens: int, head_size: int) -> None:
    """One row of angles per token, of at most a whole head."""
    shape = (num_tokens, rotation.planes)
    fits = rotation.cos_SR.shape == rotation.sin_SR.shape == shape and 2 * rotation.planes <= head_size
    assert fits, f"cos {rotation.cos_SR.shape}, sin {rotation.sin_SR.shape} for {num_tokens} heads of {head_size}"


def rotated(
    qkv_TXD: Tensor,
    rotation: Rotation,
    num_kv_heads: int,
    rms_norm: Callable[[Tensor, Tensor, float], Tensor],
    rope: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k after QK-norm and RoPE, contiguous, and v, a view."""
    cos_TR, sin_TR = rotation.angles_of_tokens()
    split = (qkv_TXD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    q_THD, k_TKD, v_TKD = qkv_TXD.split(split, dim=1)
    if rotation.q_norm_D is not None and rotation.k_norm_D is not None:
        q_THD = rms_norm(q_THD, rotation.q_norm_D, rotation.eps)
        k_TKD = rms_norm(k_TKD, rotation.k_norm_D, rotation.eps)
    return rope(q_THD, cos_TR, sin_TR, 1), rope(k_TKD, cos_TR, sin_TR, 1), v_TKD


def qkv_store_separate(
    qkv_TX: Tensor,
    rotation: Rotation,
    k: CachedPages,
    v: CachedPages,
    slot_mapping_T: Tensor,
    saturated_2K: Tensor | None = None,
) -> Tensor:
    """`qkv_store`. No host reads, so it can be part of a captured graph."""
    qkv_TXD = qkv_TX.view(qkv_TX.shape[0], -1, k.pages.shape[3])
    q_THD, k_TKD, v_TKD = rotated(qkv_TXD, rotation, k.pages.shape[1], rms_norm_triton, rope_triton)
    kv_store_triton(k_TKD, v_TKD, k, v, slot_mapping_T, saturated_2K)
    return q_THD


def qkv_rotate_separate(
    qkv_TXD: Tensor, rotation: Rotation, num_kv_heads: int, replay: Replay, amax_2K: Tensor | None
) -> tuple[Tensor, ReplayedKV]:
    """`qkv_rotate`."""
    q_THD, k_TKD, v_TKD = rotated(qkv_TXD, rotation, num_kv_heads, rms_norm_triton, rope_triton)
    if amax_2K is not None and qkv_TXD.shape[0]:
        for amax_K, x_TKD in zip(amax_2K, (k_TKD, v_TKD), strict=True):
            observed_K = torch.linalg.vector_norm(x_TKD, ord=float("inf"), dim=(0, 2))
            torch.maximum(amax_K, observed_K.float(), out=amax_K)
    if replay.mode == "none":
        return q_THD, ReplayedKV(k_TKD, v_TKD, None, None)
    return q_THD, kv_replay_triton(k_TKD, v_TKD, replay)


def qkv_rotate_backward_separate(
    dq_THD: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, qkv_TXD: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`qkv_rotate_backward`. The gradient stays float32 between RoPE and QK-norm and is rounded once."""
    split = (dq_THD.shape[1], dk_TKD.shape[1], dv_TKD.shape[1])
    dqkv_TXD = torch.empty(qkv_TXD.shape, dtype=qkv_TXD.dtype, device=qkv_TXD.device)
    dweights: list[Tensor | None] = []
    gradients, inputs = dqkv_TXD.split(split, dim=1), qkv_TXD.split(split, dim=1)
    of_q_and_k = zip(gradients, (dq_THD, dk_TKD), inputs, rotation[:2], strict=False)
    for gradient_THD, dy_THD, x_THD, weight_D in of_q_and_k:
        dx_THD, dweight_D = rope_triton(dy_THD.float(), rotation.cos_SR, rotation.sin_SR, -1), None
        if weight_D is not None:
            dx_THD, dweight_D = rms_norm_backward_triton(dx_THD, x_THD.float(), weight_D, rotation.eps)
        gradient_THD.copy_(dx_THD)
        dweights.append(dweight_D)
    gradients[2].copy_(dv_TKD)
    return dqkv_TXD, dweights[0], dweights[1]
