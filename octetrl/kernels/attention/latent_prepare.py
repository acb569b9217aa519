"""Everything between MLA's projections and its attention over pages, in one kernel: norm, both rotations, the store.

    latent = rms_norm(latent);  q = rope(q);  key = rope(key)          kernels/rows/rms_norm.py, rope.py
    latent, key -> pages at their slot                                 latent_store.py

The bytes equal those of the four calls. A token's sum of squares is taken in a tile [1, C] with eight neighbouring
elements a thread, and thus in the order of `rms_norm`'s kernel: its tiles have more rows, and the same threads along a
row. A program holds exactly eight elements a thread, so no other access can make the compiler use more.

For the rollout only: not differentiable. A token with slot -1 gets its q and writes no latent and no key.

T tokens, H heads, C latent size, R rotary size, P = R/2 planes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.attention.latent_store import _quantize_latent, check_pages, latent_store
from octetrl.kernels.attention.records import CachedPages
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rope import rotate

COLUMNS_OF_WARP = 256  # eight elements a thread
SMALLEST_LATENT, LARGEST_LATENT = 256, 2048  # padded; `rms_norm` divides others among threads in another way


@triton.jit
def _rotated(x_ptrs, cos, sin, inside, PLANES: tl.constexpr, STEP: tl.constexpr):
    """Both halves of rotated heads in float32, as in `_rope_kernel`."""
    first = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + (PLANES if STEP == 1 else 1), mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _latent_prepare_kernel(
    q_ptr, kv_a_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, latent_pages_ptr, key_pages_ptr, slot_ptr, token_scale_ptr,
    stride_q, stride_head, stride_kv_a, stride_scale_page, eps,
    HEADS: tl.constexpr, LATENT: tl.constexpr, PLANES: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr, PAGE_SIZE: tl.constexpr, STEP: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.arange(0, BLOCK_H)
    plane_P = tl.arange(0, BLOCK_P)
    inside_P = plane_P < PLANES
    cos_P = tl.load(cos_ptr + token * PLANES + plane_P, mask=inside_P, other=0.0)
    sin_P = tl.load(sin_ptr + token * PLANES + plane_P, mask=inside_P, other=0.0)
    inside_HP = (head_H < HEADS)[:, None] & inside_P[None, :]
    q_HP = q_ptr + token * stride_q + head_H[:, None] * stride_head + plane_P[None, :] * STEP
    first_HP, second_HP = _rotated(q_HP, cos_P[None, :], sin_P[None, :], inside_HP, PLANES, STEP)
    out_HP = out_ptr + (token * HEADS + head_H[:, None]) * (2 * PLANES) + plane_P[None, :]
    tl.store(out_HP, first_HP.to(out_ptr.dtype.element_ty), mask=inside_HP)
    tl.store(out_HP + PLANES, second_HP.to(out_ptr.dtype.element_ty), mask=inside_HP)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        dtype = kv_a_ptr.dtype.element_ty
        kv_a_ptr += token * stride_kv_a
        first_P, second_P = _rotated(kv_a_ptr + LATENT + plane_P * STEP, cos_P, sin_P, inside_P, PLANES, STEP)
        key_ptrs = key_pages_ptr + slot * (2 * PLANES) + plane_P
        tl.store(key_ptrs, first_P.to(dtype).to(key_pages_ptr.dtype.element_ty), mask=inside_P)
        tl.store(key_ptrs + PLANES, second_P.to(dtype).to(key_pages_ptr.dtype.element_ty), mask=inside_P)
        column_C = tl.arange(0, BLOCK_C)
        inside_1C = (column_C < LATENT)[None, :]
        x_1C = tl.load(kv_a_ptr + column_C[None, :], mask=inside_1C, other=0.0).to(tl.float32)
        rstd_1 = tl.rsqrt(tl.sum(x_1C * x_1C, axis=1) * (1.0 / LATENT) + eps)
        xhat_1C = (x_1C * rstd_1[:, None]).to(dtype).to(tl.float32)
        weight_1C = tl.load(weight_ptr + column_C[None, :], mask=inside_1C, other=0.0).to(tl.float32)
        y_C = tl.reshape((xhat_1C * weight_1C).to(dtype), (BLOCK_C,))
        latent_ptrs = latent_pages_ptr + slot * LATENT + column_C
        if CODES:
            code_C, scale = _quantize_latent(y_C.to(tl.bfloat16).to(tl.float32))
            tl.store(latent_ptrs, code_C, mask=column_C < LATENT)
            tl.store(token_scale_ptr + slot // PAGE_SIZE * stride_scale_page + slot % PAGE_SIZE, scale)
        else:
            tl.store(latent_ptrs, y_C.to(latent_pages_ptr.dtype.element_ty), mask=column_C < LATENT)


def can_fuse(latent_size: int) -> bool:
    """Whether the kernel adds a latent's squares in the order of `rms_norm`."""
    return SMALLEST_LATENT <= triton.next_power_of_2(latent_size) <= LARGEST_LATENT


def latent_prepare_triton(
    q_THR: Tensor,
    kv_a_TX: Tensor,
    weight_C: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    interleaved: bool,
    latent: CachedPages,
    key: CachedPages,
    slot_mapping_T: Tensor,
) -> Tensor:
    """The launcher: a program takes one token."""
    (tokens, heads, rotary), size, (cos_TP, sin_TP) = q_THR.shape, weight_C.numel(), angles
    assert q_THR.stride(2) == kv_a_TX.stride(1) == 1, "latent_prepare: the last axis must be contiguous"
    assert kv_a_TX.shape[1] == size + rotary and 2 * cos_TP.shape[1] == rotary, f"latent_prepare: {kv_a_TX.shape}"
    assert cos_TP.is_contiguous() and sin_TP.is_contiguous(), "latent_prepare: cos and sin must be contiguous"
    check_pages(latent, key)
    out_THR = torch.empty(q_THR.shape, dtype=q_THR.dtype, device=q_THR.device)
    block_c = triton.next_power_of_2(size)
    if tokens:
        _latent_prepare_kernel[(tokens,)](
            q_THR, kv_a_TX, weight_C, cos_TP, sin_TP, out_THR, latent.pages, key.pages, slot_mapping_T,
            latent.token_scale, q_THR.stride(0), q_THR.stride(1), kv_a_TX.stride(0),
            0 if latent.token_scale is None else latent.token_scale.stride(0), eps,
            HEADS=heads, LATENT=size, PLANES=rotary // 2, BLOCK_H=triton.next_power_of_2(heads), BLOCK_C=block_c,
            BLOCK_P=triton.next_power_of_2(rotary // 2), PAGE_SIZE=latent.pages.shape[1], STEP=2 if interleaved else 1,
            CODES=latent.token_scale is not None, num_warps=max(1, block_c // COLUMNS_OF_WARP),
            **({"enable_fp_fusion": False} if q_THR.is_cuda else {}),
        )  # fmt: skip
    return out_THR


def latent_prepare_reference(
    q_THR: Tensor,
    kv_a_TX: Tensor,
    weight_C: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    interleaved: bool,
    latent: CachedPages,
    key: CachedPages,
    slot_mapping_T: Tensor,
) -> Tensor:
    """The same by one call for each op."""
    latent_TC, key_TR = kv_a_TX.split((weight_C.numel(), q_THR.shape[2]), 1)
    latent_TC = rms_norm(latent_TC, weight_C, eps)
    key_TR = rotate(key_TR.unsqueeze(1), *angles, 1, interleaved).squeeze(1)
    latent_store(latent_TC, key_TR, latent, key, slot_mapping_T)
    return rotate(q_THR, *angles, 1, interleaved)


def latent_prepare(
    q_THR: Tensor,
    kv_a_TX: Tensor,
    weight_C: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    interleaved: bool,
    latent: CachedPages,
    key: CachedPages,
    slot_mapping_T: Tensor,
) -> Tensor:
    """The rotated queries [T, H, R], contiguous. Writes latents and keys at their slots, in place. No gradient.

    q_THR: the rotary part of every query. kv_a_TX: `kv_a`'s product, latent and rotary key side by side. angles: cos
    and sin [T, P], float32. Pages and slots as in `latent_store`.
    """
    fused = q_THR.is_cuda and can_fuse(weight_C.numel())
    prepare = latent_prepare_triton if fused else latent_prepare_reference
    return prepare(q_THR, kv_a_TX, weight_C, eps, angles, interleaved, latent, key, slot_mapping_T)
