"""Compute a rotated Q from the fused QKV output and write K and V to their pages, in one kernel before attention.

    q = rope(rms_norm(q));  k = rope(rms_norm(k))          rms_norm.py (if the model has QK-norm), rope.py
    k, v -> pages at `slot = page * page_size + offset`    kernels/attention/kv_store.py, each by its own cache's mode

The bits equal those of these calls one after the other, for two reasons:
- A head's sum of squares is taken in a tile [heads, D] with eight neighbouring elements a thread and one head's lanes
  in one warp, as in `rms_norm`'s kernel. A program holds exactly eight elements a thread, so no other access can make
  the compiler use more elements and another order.
- RoPE pairs element d with d + D/2. The tile is read twice, the second time (from L1) with its halves exchanged, and
  both are normed. Threads exchange nothing, and the sum keeps its order. `a * cos - b * sin` is written as `a * cos + b
  * (-sin)`, which has the same bits, including the sign of a zero.

A V in codes is transposed in its page, `[num_pages, K, D, page_size]`, so a token's V is D single bytes that are far
apart. For few tokens they are written in that way. For many tokens, a program takes one head of a few tokens, with
neighbouring lanes on neighbouring tokens. Their bytes share a sector if their slots are neighbours. All other work has
one program per token and a few heads. V comes first in the grid, because it takes longest.

A token with slot -1 gets its q (at the position given for it) and writes no K or V. For the rollout only: not
differentiable.

T tokens, H query heads, K kv heads, D head size, X = (H + 2K) * D, S positions of the table, R = D/2 planes, J heads of
a tile, N tokens of a tile of V.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import is_code
from octetrl.kernels.attention.attention_order import MODE_NUMBER
from octetrl.kernels.attention.kv_codes import quantize_heads
from octetrl.kernels.attention.kv_store import by_key, counter_stride, kv_store_reference, token_scale_strides
from octetrl.kernels.attention.qkv_separate import check_norms, is_fused, qkv_store_separate, rotated
from octetrl.kernels.attention.records import CachedPages, Rotation
from octetrl.kernels.rows.rms_norm import rms_norm_reference
from octetrl.kernels.rows.rope import rope_reference
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES

HEADS, HEADS_OF_MANY = 4, 8  # of a program; more if a warp with eight elements a thread needs more
MANY_TOKENS = 1024  # from this number on a program takes more heads; always so beside a transposed V


@triton.jit
def _normed(x_JD, weight_JD, rstd_J, dtype: tl.constexpr, weight_dtype: tl.constexpr):
    """The normed row in float32, as `rms_norm` would write it and `rope` read it."""
    xhat_JD = (x_JD * rstd_J[:, None]).to(weight_dtype).to(tl.float32)
    return (xhat_JD * weight_JD).to(dtype).to(tl.float32)


@triton.jit
def _rotated_heads(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, head_J, is_head_J, eps,
    SIZE: tl.constexpr, J: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads of one token after QK-norm and RoPE, in x's dtype. cos and sin point to the row of its position.

    Weights and angles are loaded once for each head, from L1. A single copy would have to go to the threads through
    shared memory.
    """
    PLANES: tl.constexpr = SIZE // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    d_D = tl.arange(0, SIZE)
    partner_D = (d_D + PLANES) % SIZE
    plane_D = d_D % PLANES
    start_J1 = x_ptr + head_J[:, None] * SIZE
    x_JD = tl.load(start_J1 + d_D[None, :], mask=is_head_J[:, None], other=0.0).to(tl.float32)
    partner_JD = tl.load(start_J1 + partner_D[None, :], mask=is_head_J[:, None], other=0.0).to(tl.float32)
    row_JD = tl.zeros((J, SIZE), tl.int32)
    own_JD, other_JD, plane_JD = row_JD + d_D[None, :], row_JD + partner_D[None, :], row_JD + plane_D[None, :]
    cos_JD = tl.load(cos_ptr + plane_JD)
    sin_JD = tl.load(sin_ptr + plane_JD)
    if NORM:
        weight_JD = tl.load(weight_ptr + own_JD).to(tl.float32)
        other_weight_JD = tl.load(weight_ptr + other_JD).to(tl.float32)
        rstd_J = tl.rsqrt(tl.sum(x_JD * x_JD, axis=1) * (1.0 / SIZE) + eps)
        weight_dtype: tl.constexpr = weight_ptr.dtype.element_ty
        x_JD = _normed(x_JD, weight_JD, rstd_J, dtype, weight_dtype)
        partner_JD = _normed(partner_JD, other_weight_JD, rstd_J, dtype, weight_dtype)
    sin_JD = tl.where((d_D < PLANES)[None, :], sin_JD * -1.0, sin_JD)  # `-x` compiles to 0 - x, whose zero is positive
    return (x_JD * cos_JD + partner_JD * sin_JD).to(dtype)


@triton.jit
def _store_rows(
    x_ND, target_N, stride_d, scale_ptr, token_scale_N, saturated_N_ptr, head_N, keep_N,
    SIZE: tl.constexpr, MODE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write rows (heads of a token, or tokens of a head) to the addresses of their first elements."""
    target_ND = target_N[:, None] + tl.arange(0, SIZE)[None, :] * stride_d
    if MODE == 0:
        tl.store(target_ND, x_ND.to(target_N.dtype.element_ty), mask=keep_N[:, None])
    else:
        x_ND = x_ND.to(tl.bfloat16).to(tl.float32)
        codes_ND, scale_N, saturated_N = quantize_heads(x_ND, scale_ptr, head_N, keep_N, MODE)
        tl.store(target_ND, codes_ND.to(target_N.dtype.element_ty), mask=keep_N[:, None])
        if MODE >= 2:
            tl.store(token_scale_N, scale_N, mask=keep_N)
        if COUNT:  # integers: the order of the additions does not matter
            tl.atomic_add(
                saturated_N_ptr + head_N, saturated_N.to(tl.int64), mask=keep_N & (saturated_N > 0), sem="relaxed"
            )


@triton.jit(do_not_specialize=["num_tokens"])
def _qkv_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, q_ptr, k_cache_ptr, v_cache_ptr, slot_ptr,
    k_scale_ptr, v_scale_ptr, k_token_ptr, v_token_ptr, saturated_ptr, num_tokens, eps, stride_token,
    stride_k_page, stride_k_head, stride_k_offset, stride_v_page, stride_v_head, stride_v_offset, stride_v_d,
    stride_scale_page, stride_scale_head, stride_scale_offset, stride_saturated,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr, J: tl.constexpr,
    V_N: tl.constexpr, NORM: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    Q_TILES: tl.constexpr = (NUM_HEADS + J - 1) // J
    KV_TILES: tl.constexpr = (KV_HEADS + J - 1) // J
    V_TILES: tl.constexpr = KV_TILES if V_N == 1 else KV_HEADS
    program = tl.program_id(0)
    v_programs = (num_tokens + V_N - 1) // V_N * V_TILES
    if program < v_programs:
        if V_N == 1:
            row_N = tl.arange(0, J)
            head_N = program % V_TILES * J + row_N
            token_N = (program // V_TILES + row_N * 0).to(tl.int64)
            inside_N = head_N < KV_HEADS
        else:
            row_N = tl.arange(0, V_N)
            head_N = program % V_TILES + row_N * 0
            token_N = (program // V_TILES * V_N + row_N).to(tl.int64)
            inside_N = token_N < num_tokens
        slot_N = tl.load(slot_ptr + token_N, mask=inside_N, other=-1)
        keep_N = slot_N >= 0
        page_N = slot_N // PAGE_SIZE
        offset_N = slot_N % PAGE_SIZE
        x_N = qkv_ptr + token_N * stride_token + (NUM_HEADS + KV_HEADS + head_N) * SIZE
        x_ND = tl.load(x_N[:, None] + tl.arange(0, SIZE)[None, :], mask=keep_N[:, None], other=0.0)
        target_N = v_cache_ptr + page_N * stride_v_page + head_N * stride_v_head + offset_N * stride_v_offset
        scale_N = v_token_ptr
        if V_MODE >= 2:
            scale_N += page_N * stride_scale_page + head_N * stride_scale_head + offset_N * stride_scale_offset
        _store_rows(
            x_ND, target_N, stride_v_d, v_scale_ptr, scale_N,
            saturated_ptr + KV_HEADS + token_N * stride_saturated if COUNT else saturated_ptr,
            head_N, keep_N, SIZE, V_MODE, COUNT,
        )  # fmt: skip
    else:
        program -= v_programs
        token = (program // (Q_TILES + KV_TILES)).to(tl.int64)
        tile = program % (Q_TILES + KV_TILES)
        position = tl.load(position_ptr + token)
        cos_ptr += position * (SIZE // 2)
        sin_ptr += position * (SIZE // 2)
        qkv_ptr += token * stride_token
        d_D = tl.arange(0, SIZE)
        if tile < Q_TILES:
            head_J = tile * J + tl.arange(0, J)
            is_head_J = head_J < NUM_HEADS
            q_JD = _rotated_heads(qkv_ptr, q_norm_ptr, cos_ptr, sin_ptr, head_J, is_head_J, eps, SIZE, J, NORM)
            q_ptr_JD = q_ptr + (token * NUM_HEADS + head_J[:, None]) * SIZE + d_D[None, :]
            tl.store(q_ptr_JD, q_JD, mask=is_head_J[:, None])
        else:
            slot = tl.load(slot_ptr + token)
            if slot >= 0:
                head_J = (tile - Q_TILES) * J + tl.arange(0, J)
                is_head_J = head_J < KV_HEADS
                k_JD = _rotated_heads(
                    qkv_ptr + NUM_HEADS * SIZE, k_norm_ptr, cos_ptr, sin_ptr, head_J, is_head_J, eps, SIZE, J, NORM
                )
                page = slot // PAGE_SIZE
                offset = slot % PAGE_SIZE
                target_J = k_cache_ptr + page * stride_k_page + head_J * stride_k_head + offset * stride_k_offset
                scale_J = k_token_ptr
                if K_MODE >= 2:
                    scale_J += page * stride_scale_page + head_J * stride_scale_head + offset * stride_scale_offset
                _store_rows(
                    k_JD, target_J, 1, k_scale_ptr, scale_J,
                    saturated_ptr + token * stride_saturated if COUNT else saturated_ptr,
                    head_J, is_head_J, SIZE, K_MODE, COUNT,
                )  # fmt: skip


def qkv_store_triton(
    qkv_TX: Tensor,
    rotation: Rotation,
    k: CachedPages,
    v: CachedPages,
    slot_mapping_T: Tensor,
    saturated_2K: Tensor | None = None,
) -> Tensor:
    """The kernel's launcher."""
    num_tokens, (kv_heads, page_size, size) = qkv_TX.shape[0], k.pages.shape[1:]
    num_heads = qkv_TX.shape[1] // size - 2 * kv_heads
    q_norm_D, k_norm_D, eps, cos_SR, sin_SR, positions_T = rotation
    assert size in SUPPORTED_HEAD_SIZES and is_fused(size), f"qkv_store: head size {size} is not a power of two"
    k_mode, v_mode = k.mode, v.mode
    assert k.pages.stride(3) == 1, "qkv_store: the last axis of K's pages must be contiguous"
    assert cos_SR.is_contiguous() and sin_SR.is_contiguous(), "qkv_store: cos and sin must be contiguous"
    q_THD = torch.empty(num_tokens, num_heads, size, dtype=qkv_TX.dtype, device=qkv_TX.device)
    turned = is_code(v.pages.dtype)
    heads = max(HEADS_OF_MANY if turned or num_tokens >= MANY_TOKENS else HEADS, 256 // size)
    v_tokens = heads if turned else 1
    kv_tiles = triton.cdiv(kv_heads, heads)
    v_programs = num_tokens * kv_tiles if v_tokens == 1 else triton.cdiv(num_tokens, v_tokens) * kv_heads
    programs = v_programs + num_tokens * (triton.cdiv(num_heads, heads) + kv_tiles)
    if num_tokens:
        _qkv_store_kernel[(programs,)](
            qkv_TX, q_norm_D, k_norm_D, cos_SR, sin_SR, positions_T, q_THD, k.pages, v.pages, slot_mapping_T,
            k.scale, v.scale, k.token_scale, v.token_scale, saturated_2K, num_tokens, eps, qkv_TX.stride(0),
            *k.pages.stride()[:3], *by_key(v.pages).stride(), *token_scale_strides(k, v),
            counter_stride(saturated_2K),
            NUM_HEADS=num_heads, KV_HEADS=kv_heads, SIZE=size, PAGE_SIZE=page_size, J=heads, V_N=v_tokens,
            NORM=q_norm_D is not None, K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode],
            COUNT="calibrated" in (k_mode, v_mode) and saturated_2K is not None, num_warps=heads * size // 256,
            **({"enable_fp_fusion": False} if qkv_TX.is_cuda else {}),
        )  # fmt: skip
    return q_THD


def qkv_store_reference(
    qkv_TX: Tensor,
    rotation: Rotation,
    k: CachedPages,
    v: CachedPages,
    slot_mapping_T: Tensor,
    saturated_2K: Tensor | None = None,
) -> Tensor:
    """The same in plain torch, from the references of its parts."""
    qkv_TXD = qkv_TX.view(qkv_TX.shape[0], -1, k.pages.shape[3])
    q_THD, k_TKD, v_TKD = rotated(qkv_TXD, rotation, k.pages.shape[1], rms_norm_reference, rope_reference)
    kv_store_reference(k_TKD, v_TKD, k, v, slot_mapping_T, saturated_2K)
    return q_THD


def qkv_store(
    qkv_TX: Tensor,
    rotation: Rotation,
    k: CachedPages,
    v: CachedPages,
    slot_mapping_T: Tensor,
    saturated_2K: Tensor | None = None,
) -> Tensor:
    """Write K and V at their slots, in place, and return the rotated q [T, H, D], contiguous.

    qkv_TX: [T, (H + 2K) * D] or [T, H + 2K, D], q first, contiguous except for the stride of a token. `rotation` has
    positions and whole tables. slot_mapping_T: int64. Pages and counter are those of `kv_store`. ValueError for an FP8
    cache without scales.
    """
    kv_heads, size = k.pages.shape[1], k.pages.shape[3]
    if qkv_TX.dim() == 3:
        qkv_TX = qkv_TX.flatten(1)
    assert qkv_TX.shape[1] % size == 0 and qkv_TX.shape[1] // size > 2 * kv_heads, f"qkv_store: {qkv_TX.shape}"
    assert qkv_TX.stride(1) == 1, f"qkv_store: last axis has stride {qkv_TX.stride(1)}, must be 1"
    check_norms(rotation)
    assert rotation.planes <= size // 2, f"qkv_store: cos {tuple(rotation.cos_SR.shape)}, head size {size}"
    on_gpu = qkv_store_triton if is_fused(size, rotation.planes) else qkv_store_separate
    store = on_gpu if qkv_TX.is_cuda else qkv_store_reference
    return store(qkv_TX, rotation, k, v, slot_mapping_T, saturated_2K)
