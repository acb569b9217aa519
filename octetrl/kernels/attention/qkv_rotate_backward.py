"""The backward of `qkv_rotate`: the gradient of the fused QKV output from those of q, k and v, in one kernel.

    g   = rotate_back(dy)                                             q and k; RoPE by the opposite angle
    dx  = rstd * (g * weight - xhat * mean(g * weight * xhat))        if the model has QK-norm; xhat is recomputed
    dv  is copied: the gradient of the replay is straight-through

It computes in float32 and rounds once to the gradient's dtype. The norm weights' gradients are sums of g * xhat over
tokens and heads, added as in `rms_norm_backward`: a fixed number of programs, each with its own float32 row, and a
second kernel that adds the rows. Two runs therefore give the same bits. The tiles are those of `qkv_rotate`, so a pair
of RoPE is in one thread. The next tile is prefetched during the current one (`STAGES`).

For each D elements of a head of q or k, 4 D bytes are read (2 D without a norm, because x is not needed) and 2 D
written; of V, 2 D and 2 D.

T tokens, H query heads, K kv heads, X = H + 2K, D head size, R = D/2 planes, J rows of a tile, P partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.attention.qkv_rotate import head_rows, head_tiles, load_halves, load_weight, tile_of
from octetrl.kernels.attention.qkv_separate import check_angles, check_norms, is_fused, qkv_rotate_backward_separate
from octetrl.kernels.attention.records import Rotation
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward_reference, sum_partials
from octetrl.kernels.rows.rope import rope_reference

PROGRAMS = 528  # four for each of an H200's multiprocessors; fixed, so that the bits do not depend on the device
STAGES = 3
WARPS = 4


@triton.jit
def _rotate_back(
    dy_ptr, stride_dy_token, stride_dy_head, x_ptr, dx_ptr, stride_x_token, weight_ptr, cos_ptr, sin_ptr, partial_ptr,
    num_tokens, num_tiles, first_head, eps,
    HEADS: tl.constexpr, X: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr, J: tl.constexpr,
    NORM: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """This program's tiles of q's heads, or of k's."""
    SIZE: tl.constexpr = 2 * PLANES
    plane_R = tl.arange(0, PLANES)
    first_sum_JR = tl.zeros((J, PLANES), tl.float32)
    second_sum_JR = tl.zeros((J, PLANES), tl.float32)
    if NORM:
        first_weight_JR, second_weight_JR = load_weight(weight_ptr, J, PLANES)
    for tile in tl.range(tl.program_id(0), num_tiles, PROGRAMS, num_stages=STAGES):
        token_J, head_J, inside_J = head_rows(tile, num_tokens, HEADS, BLOCK, J)
        dy_J = token_J * stride_dy_token + head_J * stride_dy_head
        first_dy_JR, second_dy_JR = load_halves(dy_ptr, dy_J, inside_J, J, PLANES)
        angle_JR = token_J[:, None] * PLANES + plane_R[None, :]
        cos_JR = tl.load(cos_ptr + angle_JR, mask=inside_J[:, None], other=0.0)
        sin_JR = tl.load(sin_ptr + angle_JR, mask=inside_J[:, None], other=0.0)
        first_g_JR = first_dy_JR * cos_JR + second_dy_JR * sin_JR
        second_g_JR = second_dy_JR * cos_JR - first_dy_JR * sin_JR
        if NORM:
            x_J = token_J * stride_x_token + (first_head + head_J) * SIZE
            first_x_JR, second_x_JR = load_halves(x_ptr, x_J, inside_J, J, PLANES)
            squares_J = tl.sum(first_x_JR * first_x_JR + second_x_JR * second_x_JR, 1)
            rstd_J1 = tl.rsqrt(squares_J * (1.0 / SIZE) + eps)[:, None]
            first_x_JR *= rstd_J1
            second_x_JR *= rstd_J1
            first_sum_JR += first_g_JR * first_x_JR
            second_sum_JR += second_g_JR * second_x_JR
            first_g_JR *= first_weight_JR
            second_g_JR *= second_weight_JR
            mean_J = tl.sum(first_g_JR * first_x_JR + second_g_JR * second_x_JR, 1) * (1.0 / SIZE)
            first_g_JR = (first_g_JR - first_x_JR * mean_J[:, None]) * rstd_J1
            second_g_JR = (second_g_JR - second_x_JR * mean_J[:, None]) * rstd_J1
        dx_JR = dx_ptr + ((token_J * X + first_head + head_J) * SIZE)[:, None] + plane_R[None, :]
        tl.store(dx_JR, first_g_JR.to(dx_ptr.dtype.element_ty), mask=inside_J[:, None])
        tl.store(dx_JR + PLANES, second_g_JR.to(dx_ptr.dtype.element_ty), mask=inside_J[:, None])
    if NORM:
        tl.store(partial_ptr + plane_R, tl.sum(first_sum_JR, 0))
        tl.store(partial_ptr + PLANES + plane_R, tl.sum(second_sum_JR, 0))


@triton.jit(do_not_specialize=["num_tokens", "q_tiles", "kv_tiles"])
def _qkv_rotate_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dqkv_ptr, partial_ptr,
    num_tokens, q_tiles, kv_tiles, eps, stride_q_token, stride_q_head, stride_k_token, stride_k_head,
    stride_v_token, stride_v_head, stride_token,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr, J: tl.constexpr, NORM: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = SIZE // 2
    X: tl.constexpr = NUM_HEADS + 2 * KV_HEADS
    partial_ptr += tl.program_id(0) * (2 * SIZE)
    _rotate_back(
        dq_ptr, stride_q_token, stride_q_head, qkv_ptr, dqkv_ptr, stride_token, q_weight_ptr, cos_ptr, sin_ptr,
        partial_ptr, num_tokens, q_tiles, 0, eps, NUM_HEADS, X, PLANES, Q_BLOCK, J, NORM, PROGRAMS, STAGES,
    )  # fmt: skip
    _rotate_back(
        dk_ptr, stride_k_token, stride_k_head, qkv_ptr, dqkv_ptr, stride_token, k_weight_ptr, cos_ptr, sin_ptr,
        partial_ptr + SIZE, num_tokens, kv_tiles, NUM_HEADS, eps, KV_HEADS, X, PLANES, KV_BLOCK, J, NORM, PROGRAMS,
        STAGES,
    )  # fmt: skip
    column_D = tl.arange(0, SIZE)
    for tile in tl.range(tl.program_id(0), kv_tiles, PROGRAMS, num_stages=STAGES):
        token_J, head_J, inside_J = head_rows(tile, num_tokens, KV_HEADS, KV_BLOCK, J)
        dv_JD = dv_ptr + (token_J * stride_v_token + head_J * stride_v_head)[:, None] + column_D[None, :]
        dx_JD = dqkv_ptr + ((token_J * X + NUM_HEADS + KV_HEADS + head_J) * SIZE)[:, None] + column_D[None, :]
        tl.store(dx_JD, tl.load(dv_JD, mask=inside_J[:, None]), mask=inside_J[:, None])


def qkv_rotate_backward_triton(
    dq_THD: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, qkv_TXD: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The kernels' launcher."""
    (num_tokens, num_heads, size), kv_heads = dq_THD.shape, dk_TKD.shape[1]
    q_norm_D, k_norm_D, eps, cos_TR, sin_TR, _ = rotation
    gradients = (dq_THD, dk_TKD, dv_TKD)
    assert all(x.stride(2) == 1 for x in gradients), "qkv_rotate_backward: the last axis must be contiguous"
    assert qkv_TXD.stride()[1:] == (size, 1), f"qkv_rotate_backward: heads lie {qkv_TXD.stride()} apart"
    assert cos_TR.is_contiguous() and sin_TR.is_contiguous(), "qkv_rotate_backward: cos and sin must be contiguous"
    dqkv_TXD = torch.empty(qkv_TXD.shape, dtype=qkv_TXD.dtype, device=qkv_TXD.device)
    partial = torch.empty(PROGRAMS, 2 * size, dtype=torch.float32, device=qkv_TXD.device)
    rows = tile_of(size, WARPS)
    (q_block, q_tiles), (kv_block, kv_tiles) = (head_tiles(num_tokens, n, rows) for n in (num_heads, kv_heads))
    _qkv_rotate_backward_kernel[(PROGRAMS,)](
        *gradients, qkv_TXD, q_norm_D, k_norm_D, cos_TR, sin_TR, dqkv_TXD, partial, num_tokens, q_tiles, kv_tiles,
        eps, *(stride for x in gradients for stride in x.stride()[:2]), qkv_TXD.stride(0),
        NUM_HEADS=num_heads, KV_HEADS=kv_heads, SIZE=size, Q_BLOCK=q_block, KV_BLOCK=kv_block, J=rows,
        NORM=q_norm_D is not None, PROGRAMS=PROGRAMS, STAGES=STAGES, num_warps=WARPS,
        **({"enable_fp_fusion": False} if qkv_TXD.is_cuda else {}),
    )  # fmt: skip
    if q_norm_D is None:
        return dqkv_TXD, None, None
    dweights_2D = sum_partials(partial, q_norm_D.dtype)
    return dqkv_TXD, dweights_2D[:size], dweights_2D[size:]


def qkv_rotate_backward_reference(
    dq_THD: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, qkv_TXD: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same in plain torch, float32, from the references of its parts."""
    split = (dq_THD.shape[1], dk_TKD.shape[1], dv_TKD.shape[1])
    q_THD, k_TKD, _ = qkv_TXD.split(split, dim=1)
    gradients: list[Tensor] = []
    dweights: list[Tensor | None] = []
    for dy, x, weight_D in ((dq_THD, q_THD, rotation.q_norm_D), (dk_TKD, k_TKD, rotation.k_norm_D)):
        gradient, dweight_D = rope_reference(dy.float(), rotation.cos_SR, rotation.sin_SR, -1), None
        if weight_D is not None:
            gradient, dweight_D = rms_norm_backward_reference(gradient, x.float(), weight_D, rotation.eps)
        gradients.append(gradient)
        dweights.append(dweight_D)
    dqkv_TXD = torch.cat([*gradients, dv_TKD.float()], dim=1).to(qkv_TXD.dtype)
    return dqkv_TXD, dweights[0], dweights[1]


def qkv_rotate_backward(
    dq_THD: Tensor, dk_TKD: Tensor, dv_TKD: Tensor, qkv_TXD: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dqkv, contiguous, in qkv's dtype; the norm weights' gradients in their dtypes, None without a norm).

    dq, dk, dv: last axis contiguous. qkv_TXD, rotation: those of `qkv_rotate`.
    """
    heads = dq_THD.shape[1] + dk_TKD.shape[1] + dv_TKD.shape[1]
    assert qkv_TXD.shape == (dq_THD.shape[0], heads, dq_THD.shape[2]), f"qkv_rotate_backward: qkv {qkv_TXD.shape}"
    check_norms(rotation)
    check_angles(rotation, len(dq_THD), dq_THD.shape[2])
    fused = is_fused(dq_THD.shape[2], rotation.planes)
    on_gpu = qkv_rotate_backward_triton if fused else qkv_rotate_backward_separate
    backward = on_gpu if qkv_TXD.is_cuda else qkv_rotate_backward_reference
    return backward(dq_THD, dk_TKD, dv_TKD, qkv_TXD, rotation)
