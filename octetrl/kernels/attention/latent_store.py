"""Write MLA's latents and rotary keys into their pages, and compute the same values for a trainer, which has no pages.

A token leaves one latent, which all heads read as key and as value, and one rotated key. `latent_store` writes them at
`slot = page * page_size + offset`; slot -1 is skipped. The pages are

    latent        [num_pages, page_size, C]    BF16 or float32, or E4M3 codes
    rotary key    [num_pages, page_size, R]    BF16 or float32

Codes have one scale a token, `token_scale` [num_pages, 1, page_size]. Scale and inverse follow from the token's amax by
the rule of every block (fp8/quantize.py). What attention multiplies is the *value* of a code,

    value = bf16(code * scale)        a float32 product, rounded to nearest even

so it needs no scales inside. `latent_replay` returns these values for tokens that are in no cache. NaN stays NaN.

T tokens, C latent size, R rotary size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3, decode_e4m3
from octetrl.fp8.quantize import quantize_kv_per_token
from octetrl.kernels.attention.records import CachedPages
from octetrl.shapes.blocks import KVMode


def latent_store(
    latent_TC: Tensor, key_TR: Tensor, latent: CachedPages, key: CachedPages, slot_mapping_T: Tensor
) -> None:
    """Write latents and rotary keys at their slots, in place. The last axis of all is contiguous.

    slot_mapping_T: int64; -1 skips the token. The latents' `token_scale` [num_pages, 1, page_size] is written here.
    Raises ValueError unless E4M3 pages have it, and they only.
    """
    if (latent.pages.dtype == E4M3) != (latent.token_scale is not None):
        raise ValueError("latents have a scale for each token if, and only if, their pages are FP8")
    store = latent_store_triton if latent_TC.is_cuda else latent_store_reference
    store(latent_TC, key_TR, latent, key, slot_mapping_T)


def check_pages(latent: CachedPages, key: CachedPages) -> None:
    """For the kernels that write them."""
    assert latent.pages.is_contiguous() and key.pages.is_contiguous(), "pages of latents and keys must be contiguous"
    assert latent.token_scale is None or latent.token_scale.stride(2) == 1, "a page's scales must be contiguous"


def latent_store_reference(
    latent_TC: Tensor, key_TR: Tensor, latent: CachedPages, key: CachedPages, slot_mapping_T: Tensor
) -> None:
    """`latent_store` in plain torch."""
    kept_T = slot_mapping_T >= 0
    slot_T = slot_mapping_T[kept_T].long()
    page_T, offset_T = slot_T // latent.pages.shape[1], slot_T % latent.pages.shape[1]
    key.pages[page_T, offset_T] = key_TR[kept_T].to(key.pages.dtype)
    if latent.token_scale is None:
        latent.pages[page_T, offset_T] = latent_TC[kept_T].to(latent.pages.dtype)
        return
    codes_T1C, scale_T1 = quantize_kv_per_token(latent_TC[kept_T].unsqueeze(1))
    latent.pages.view(torch.uint8)[page_T, offset_T] = codes_T1C.squeeze(1).view(torch.uint8)
    latent.token_scale[page_T, :, offset_T] = scale_T1


def latent_replay(latent_TC: Tensor, kv_mode: KVMode) -> Tensor:
    """The latents [T, C] as attention would read them from the cache, in the same dtype. "none" changes nothing."""
    if kv_mode == "none":
        return latent_TC
    assert kv_mode == "dynamic", "latents have a scale for each token"
    return latent_replay_triton(latent_TC) if latent_TC.is_cuda else latent_replay_reference(latent_TC)


def latent_replay_reference(latent_TC: Tensor) -> Tensor:
    """`latent_replay` of a dynamic cache in plain torch."""
    codes_T1C, scale_T1 = quantize_kv_per_token(latent_TC.unsqueeze(1))
    return latent_values(codes_T1C.squeeze(1), scale_T1).to(latent_TC.dtype)


def latent_values(codes_NC: Tensor, scale_N1: Tensor) -> Tensor:
    """BF16 values [N, C] of codes and their scales [N, 1]."""
    return (decode_e4m3(codes_NC) * scale_N1).to(torch.bfloat16)


# ---------------------------------------------------------------- Triton


@triton.jit
def _quantize_latent(x_C):
    """Codes and scale of one latent, float32 values rounded to BF16 before."""
    amax = tl.max(tl.abs(x_C), 0)
    largest = tl.full(amax.shape, 448.0, tl.float32)
    scale = tl.div_rn(amax, largest)
    inverse = tl.minimum(tl.div_rn(largest, amax), 3.4028234663852886e38)
    scale = tl.where(amax == 0.0, 1.0, scale)
    inverse = tl.where(amax == 0.0, 1.0, inverse)
    finite = tl.min((tl.abs(x_C) < float("inf")).to(tl.int32), 0) == 1
    scale = tl.where(finite, scale, float("nan"))
    inverse = tl.where(finite, inverse, float("nan"))
    codes_C = tl.clamp(x_C * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return codes_C, scale


@triton.jit
def _latent_store_kernel(
    latent_ptr, key_ptr, latent_pages_ptr, key_pages_ptr, slot_ptr, token_scale_ptr,
    stride_latent, stride_key, stride_scale_page,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        c_C = tl.arange(0, BLOCK_C)
        r_R = tl.arange(0, BLOCK_R)
        key_R = tl.load(key_ptr + token * stride_key + r_R, mask=r_R < ROTARY)
        tl.store(key_pages_ptr + slot * ROTARY + r_R, key_R.to(key_pages_ptr.dtype.element_ty), mask=r_R < ROTARY)
        x_C = tl.load(latent_ptr + token * stride_latent + c_C, mask=c_C < LATENT, other=0.0)
        if CODES:
            codes_C, scale = _quantize_latent(x_C.to(tl.bfloat16).to(tl.float32))
            tl.store(latent_pages_ptr + slot * LATENT + c_C, codes_C, mask=c_C < LATENT)
            tl.store(token_scale_ptr + slot // PAGE_SIZE * stride_scale_page + slot % PAGE_SIZE, scale)
        else:
            x_C = x_C.to(latent_pages_ptr.dtype.element_ty)
            tl.store(latent_pages_ptr + slot * LATENT + c_C, x_C, mask=c_C < LATENT)


def latent_store_triton(
    latent_TC: Tensor, key_TR: Tensor, latent: CachedPages, key: CachedPages, slot_mapping_T: Tensor
) -> None:
    """`latent_store` as one kernel: a program writes one token."""
    assert latent_TC.stride(1) == key_TR.stride(1) == 1, "latent_store: the last axis must be contiguous"
    check_pages(latent, key)
    (tokens, size), rotary = latent_TC.shape, key_TR.shape[1]
    if tokens == 0:
        return
    _latent_store_kernel[(tokens,)](
        latent_TC, key_TR, latent.pages, key.pages, slot_mapping_T, latent.token_scale,
        latent_TC.stride(0), key_TR.stride(0), 0 if latent.token_scale is None else latent.token_scale.stride(0),
        LATENT=size, ROTARY=rotary, BLOCK_C=triton.next_power_of_2(size), BLOCK_R=triton.next_power_of_2(rotary),
        PAGE_SIZE=latent.pages.shape[1], CODES=latent.token_scale is not None, num_warps=4,
        **({"enable_fp_fusion": False} if latent_TC.is_cuda else {}),
    )  # fmt: skip


@triton.jit
def _latent_replay_kernel(x_ptr, y_ptr, stride_x, LATENT: tl.constexpr, BLOCK_C: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, BLOCK_C)
    x_C = tl.load(x_ptr + token * stride_x + c_C, mask=c_C < LATENT, other=0.0).to(tl.bfloat16).to(tl.float32)
    codes_C, scale = _quantize_latent(x_C)
    y_C = (codes_C.to(tl.float32) * scale).to(tl.bfloat16)
    tl.store(y_ptr + token * LATENT + c_C, y_C.to(y_ptr.dtype.element_ty), mask=c_C < LATENT)


def latent_replay_triton(latent_TC: Tensor) -> Tensor:
    """`latent_replay` of a dynamic cache as one kernel."""
    assert latent_TC.stride(1) == 1, "latent_replay: the last axis must be contiguous"
    (tokens, latent), device = latent_TC.shape, latent_TC.device
    value_TC = torch.empty(tokens, latent, dtype=latent_TC.dtype, device=device)
    if tokens:
        _latent_replay_kernel[(tokens,)](
            latent_TC, value_TC, latent_TC.stride(0), LATENT=latent, BLOCK_C=triton.next_power_of_2(latent),
            num_warps=4, **({"enable_fp_fusion": False} if latent_TC.is_cuda else {}),
        )  # fmt: skip
    return value_TC
