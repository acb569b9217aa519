"""Write K and V into their pages, and compute the same codes for a trainer, which has no pages.

`kv_store` writes one token's K and V (after QK-norm and RoPE) at `slot = page * page_size + offset`. Slot -1 is
skipped, so padded batches need no branch. One kv head of one page is one contiguous matrix, which an attention tile
loads:

    K, in any dtype        [num_pages, K, page_size, D]
    V, BF16 or float32     [num_pages, K, page_size, D]
    V, E4M3 or int8        [num_pages, K, D, page_size]

V in codes is transposed because codes are converted in registers and V is multiplied from the left with D as rows. Its
codes then load in the needed layout, which is worth 7-12% of a decode on an H200 (128 x 2,560 keys). The cost is that
this kernel stores single bytes. Only this file knows the layout: `v_page` gives a page's shape, and `by_key` a view
with the layout of K.

How a value becomes a code:

    calibrated   code = e4m3(clamp(x * inverse, -448, 448)), inverse = min(1 / scale[head], FLT_MAX)
    dynamic      amax over the head's D; scale and inverse by the rule of every block (fp8/quantize.py)
    int8         amax over the head's D; code = round(x * (127 / amax)), ties to even
    none         the value, cast to the cache's dtype

K and V each follow the rule of their own cache: either may be BF16 beside codes of the other. Before quantisation x is
rounded to BF16. Divisions are IEEE float32 (`div_rn`), so the bytes equal the reference's. NaN stays NaN (0x7f). Values
outside the calibrated range, and NaN, are clamped and counted per head in `saturated_2K` (row 0 K, row 1 V). A counter
[T, 2, K] has a row for each token, so that tokens can be left out of the count afterwards.

`kv_replay` quantises by the same rule. It returns the codes converted, exactly, to the dtype in which the training
forward multiplies them (`attention_order.operand_dtype`). One conversion per layer is faster than one in the attention
kernel. A K or V that stays BF16 is returned unchanged.

T tokens, K kv heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3, E4M3_MAX, decode_e4m3, is_code
from octetrl.fp8.quantize import inverse_of, quantize_kv, quantize_kv_per_head
from octetrl.kernels.attention.attention_order import MODE_NUMBER, operand_dtype
from octetrl.kernels.attention.kv_codes import quantize_heads
from octetrl.kernels.attention.records import CachedPages, Replay


def v_pages_shape(num_pages: int, num_heads: int, page_size: int, head_size: int, dtype: torch.dtype) -> torch.Size:
    """The shape of a V cache in this dtype. Pages of codes are transposed (see the module's docstring)."""
    return torch.Size((num_pages, num_heads, *v_page(page_size, head_size, dtype)))


def v_page(page_size: int, head_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """The shape of one head of one page of V."""
    return (head_size, page_size) if is_transposed(dtype) else (page_size, head_size)


def is_transposed(dtype: torch.dtype) -> bool:
    """Whether V's pages in this dtype have the head's elements as rows."""
    return is_code(dtype)


def by_key(v_cache: Tensor) -> Tensor:
    """View [num_pages, K, page_size, D] of a V cache in its own layout."""
    return v_cache.transpose(2, 3) if is_transposed(v_cache.dtype) else v_cache


def kv_store(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k: CachedPages,
    v: CachedPages,
    slot_mapping_T: Tensor,
    saturated_2K: Tensor | None = None,
) -> None:
    """Write K and V at their slots, in place.

    k_TKD, v_TKD: [T, K, D], last axis contiguous. k, v: pages in the layout above, each by its dtype, with per-head
    scales [K] or per-token scales [num_pages, K, page_size], which are written here. slot_mapping_T: int64; -1 skips
    the token. saturated_2K: int64 counter [2, K] or [T, 2, K], added to. Raises ValueError for an FP8 cache without
    scales.
    """
    store = kv_store_triton if k_TKD.is_cuda else kv_store_reference
    store(k_TKD, v_TKD, k, v, slot_mapping_T, saturated_2K)


def kv_store_reference(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k: CachedPages,
    v: CachedPages,
    slot_mapping_T: Tensor,
    saturated_2K: Tensor | None = None,
) -> None:
    """`kv_store` in plain torch."""
    kept_T = slot_mapping_T >= 0
    slot_T = slot_mapping_T[kept_T].long()
    page_T, offset_T = slot_T // k.pages.shape[2], slot_T % k.pages.shape[2]
    both = ((k_TKD, k.pages, k), (v_TKD, by_key(v.pages), v))
    for which, (x_TKD, cache, cached) in enumerate(both):
        x_TKD = x_TKD[kept_T]
        if cached.scale_in_use is None:
            cache[page_T, :, offset_T] = x_TKD.to(cache.dtype)
            continue
        if cached.scale is not None:
            codes = quantize_kv_per_head(x_TKD, cached.scale).codes
            if saturated_2K is not None:
                per_token_TK = saturated_per_token(x_TKD, cached.scale)
                if saturated_2K.dim() == 3:
                    saturated_2K[: len(kept_T), which][kept_T] += per_token_TK
                else:
                    saturated_2K[which] += per_token_TK.sum(0)
        else:
            assert cached.token_scale is not None
            codes, scale_TK = quantize_kv(x_TKD, cached.mode)
            cached.token_scale[page_T, :, offset_T] = scale_TK
        cache.view(torch.uint8)[page_T, :, offset_T] = codes.view(torch.uint8)


def saturated_count(x_TKD: Tensor, scale_K: Tensor) -> Tensor:
    """Number of values of each head that are outside the calibrated range, or NaN: int64 [K]."""
    return saturated_per_token(x_TKD, scale_K).sum(0)


def saturated_per_token(x_TKD: Tensor, scale_K: Tensor) -> Tensor:
    """`saturated_count` of each token: int64 [T, K]."""
    scaled = x_TKD.to(torch.bfloat16).float() * inverse_of(scale_K)[None, :, None]
    return (~(scaled.abs() <= E4M3_MAX)).sum(dim=2)


def counter_stride(saturated_2K: Tensor | None) -> int:
    """Elements between the counters of two tokens; 0: all tokens share one."""
    if saturated_2K is None:
        return 0
    shared = saturated_2K if saturated_2K.dim() == 2 else saturated_2K[0]
    assert shared.is_contiguous(), "kv_store: the saturation counters of a token must be contiguous"
    return 0 if saturated_2K.dim() == 2 else saturated_2K.stride(0)


def token_scale_strides(k: CachedPages, v: CachedPages) -> tuple[int, ...]:
    """Of the scales of tokens, which lie alike in K and V; zeros if there are none."""
    strides = [x.token_scale.stride() for x in (k, v) if x.token_scale is not None]
    assert not strides or strides[0] == strides[-1], "kv_store: scales of tokens lie differently"
    return strides[0] if strides else (0, 0, 0)


class ReplayedKV(NamedTuple):
    """K and V as the attention kernels multiply them: codes in the operand dtype [T, K, D], and the codes' scales.

    Scales are float32 [K] for "calibrated", [T, K] for "dynamic" and "int8", None for unquantised values.
    """

    k_TKD: Tensor
    v_TKD: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


def kv_replay(k_TKD: Tensor, v_TKD: Tensor, replay: Replay) -> ReplayedKV:
    """K and V after the cache's quantiser. What the cache does not hold in codes is returned unchanged."""
    if replay.mode == "none":
        return ReplayedKV(k_TKD, v_TKD, None, None)
    run = kv_replay_triton if k_TKD.is_cuda else kv_replay_reference
    return run(k_TKD, v_TKD, replay.checked())


def kv_replay_reference(k_TKD: Tensor, v_TKD: Tensor, replay: Replay) -> ReplayedKV:
    """`kv_replay` in plain torch."""

    def replayed(x_TKD: Tensor, scale_K: Tensor | None) -> tuple[Tensor, Tensor]:
        codes, scale = quantize_kv(x_TKD, replay.mode) if scale_K is None else quantize_kv_per_head(x_TKD, scale_K)
        return decode_e4m3(codes, operand_dtype(E4M3, replay.mode)), scale

    k_TKD, k_scale = replayed(k_TKD, replay.k_scale_K) if replay.quantized != "v" else (k_TKD, None)
    v_TKD, v_scale = replayed(v_TKD, replay.v_scale_K) if replay.quantized != "k" else (v_TKD, None)
    return ReplayedKV(k_TKD, v_TKD, k_scale, v_scale)


# ---------------------------------------------------------------- Triton


@triton.jit
def _store_heads(
    x_ptr, cache_ptr, scale_ptr, token_scale_ptr, saturated_ptr, page, offset,
    stride_head, stride_page, stride_cache_head, stride_offset, stride_d, stride_scale_page, stride_scale_head,
    stride_scale_offset,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, MODE: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    head_K = tl.arange(0, BLOCK_K)
    d_D = tl.arange(0, BLOCK_D)
    is_head_K = head_K < HEADS
    inside_KD = is_head_K[:, None] & (d_D < HEAD_SIZE)[None, :]
    x_KD = tl.load(x_ptr + head_K[:, None] * stride_head + d_D[None, :], mask=inside_KD, other=0.0)
    cache_ptr += page * stride_page + offset * stride_offset
    target_KD = cache_ptr + head_K[:, None] * stride_cache_head + d_D[None, :] * stride_d
    if MODE == 0:
        tl.store(target_KD, x_KD.to(cache_ptr.dtype.element_ty), mask=inside_KD)
    else:
        x_KD = x_KD.to(tl.bfloat16).to(tl.float32)
        codes_KD, scale_K, saturated_K = quantize_heads(x_KD, scale_ptr, head_K, is_head_K, MODE)
        tl.store(target_KD, codes_KD.to(cache_ptr.dtype.element_ty), mask=inside_KD)
        if MODE >= 2:
            target_K = (
                token_scale_ptr + page * stride_scale_page + head_K * stride_scale_head + offset * stride_scale_offset
            )
            tl.store(target_K, scale_K, mask=is_head_K)
        if COUNT:  # integers: the order of the additions does not matter
            tl.atomic_add(
                saturated_ptr + head_K, saturated_K.to(tl.int64), mask=is_head_K & (saturated_K > 0), sem="relaxed"
            )


@triton.jit
def _kv_store_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, k_token_ptr, v_token_ptr, saturated_ptr,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_k_page, stride_k_cache_head, stride_k_offset, stride_v_page, stride_v_cache_head, stride_v_offset,
    stride_v_d, stride_scale_page, stride_scale_head, stride_scale_offset, stride_saturated,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_MODE: tl.constexpr, V_MODE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot >= 0:
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        if COUNT:
            saturated_ptr += token * stride_saturated
        _store_heads(
            k_ptr + token * stride_k_token, k_cache_ptr, k_scale_ptr, k_token_ptr, saturated_ptr, page, offset,
            stride_k_head, stride_k_page, stride_k_cache_head, stride_k_offset, 1, stride_scale_page, stride_scale_head,
            stride_scale_offset, HEADS, BLOCK_K, HEAD_SIZE, BLOCK_D, K_MODE, COUNT,
        )  # fmt: skip
        _store_heads(
            v_ptr + token * stride_v_token, v_cache_ptr, v_scale_ptr, v_token_ptr,
            saturated_ptr + HEADS if COUNT else saturated_ptr, page, offset,
            stride_v_head, stride_v_page, stride_v_cache_head, stride_v_offset, stride_v_d, stride_scale_page,
            stride_scale_head, stride_scale_offset, HEADS, BLOCK_K, HEAD_SIZE, BLOCK_D, V_MODE, COUNT,
        )  # fmt: skip


def kv_store_triton(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k: CachedPages,
    v: CachedPages,
    slot_mapping_T: Tensor,
    saturated_2K: Tensor | None = None,
) -> None:
    """`kv_store` as one kernel: a program writes all heads of one token's K and V."""
    num_tokens, num_heads, head_size = k_TKD.shape
    k_mode, v_mode = k.mode, v.mode
    assert k_TKD.stride(2) == v_TKD.stride(2) == k.pages.stride(3) == 1, "kv_store: the last axis must be contiguous"
    count = "calibrated" in (k_mode, v_mode) and saturated_2K is not None
    if num_tokens == 0:
        return
    _kv_store_kernel[(num_tokens,)](
        k_TKD, v_TKD, k.pages, v.pages, slot_mapping_T, k.scale, v.scale, k.token_scale, v.token_scale,
        saturated_2K, k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1), *k.pages.stride()[:3],
        *by_key(v.pages).stride(), *token_scale_strides(k, v), counter_stride(saturated_2K),
        HEADS=num_heads, BLOCK_K=triton.next_power_of_2(num_heads), HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size), PAGE_SIZE=k.pages.shape[2],
        K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode], COUNT=count,
        num_warps=4, **({"enable_fp_fusion": False} if k_TKD.is_cuda else {}),
    )  # fmt: skip


@triton.jit
def _replay_heads(
    x_ptr, out_ptr, scale_ptr, token, stride_token, stride_head,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    head_K = tl.arange(0, BLOCK_K)
    d_D = tl.arange(0, BLOCK_D)
    is_head_K = head_K < HEADS
    inside_KD = is_head_K[:, None] & (d_D < HEAD_SIZE)[None, :]
    x_offset_KD = token * stride_token + head_K[:, None] * stride_head + d_D[None, :]
    x_KD = tl.load(x_ptr + x_offset_KD, mask=inside_KD, other=0.0).to(tl.bfloat16).to(tl.float32)
    codes_KD, scale_K, _saturated_K = quantize_heads(x_KD, scale_ptr, head_K, is_head_K, MODE)
    out_offset_KD = (token * HEADS + head_K[:, None]) * HEAD_SIZE + d_D[None, :]
    tl.store(out_ptr + out_offset_KD, codes_KD.to(out_ptr.dtype.element_ty), mask=inside_KD)
    if MODE >= 2:
        tl.store(scale_ptr + token * HEADS + head_K, scale_K, mask=is_head_K)


@triton.jit
def _kv_replay_kernel(
    k_ptr, v_ptr, k_out_ptr, v_out_ptr, k_scale_ptr, v_scale_ptr,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, MODE: tl.constexpr,
    QUANTIZE_K: tl.constexpr, QUANTIZE_V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if QUANTIZE_K:
        _replay_heads(
            k_ptr, k_out_ptr, k_scale_ptr, token, stride_k_token, stride_k_head,
            HEADS, BLOCK_K, HEAD_SIZE, BLOCK_D, MODE,
        )  # fmt: skip
    if QUANTIZE_V:
        _replay_heads(
            v_ptr, v_out_ptr, v_scale_ptr, token, stride_v_token, stride_v_head,
            HEADS, BLOCK_K, HEAD_SIZE, BLOCK_D, MODE,
        )  # fmt: skip


def kv_replay_triton(k_TKD: Tensor, v_TKD: Tensor, replay: Replay) -> ReplayedKV:
    """`kv_replay` as one kernel."""
    num_tokens, num_heads, head_size = k_TKD.shape
    assert k_TKD.stride(2) == v_TKD.stride(2) == 1, "kv_replay: the last axis must be contiguous"

    def outputs(scale_K: Tensor | None) -> tuple[Tensor, Tensor | None]:
        codes_TKD = torch.empty(k_TKD.shape, dtype=operand_dtype(E4M3, replay.mode), device=k_TKD.device)
        return codes_TKD, torch.empty(num_tokens, num_heads, device=k_TKD.device) if scale_K is None else scale_K

    k_out_TKD, k_scale = outputs(replay.k_scale_K) if replay.quantized != "v" else (k_TKD, None)
    v_out_TKD, v_scale = outputs(replay.v_scale_K) if replay.quantized != "k" else (v_TKD, None)
    if num_tokens > 0:
        _kv_replay_kernel[(num_tokens,)](
            k_TKD, v_TKD, k_out_TKD, v_out_TKD, k_scale, v_scale,
            k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
            HEADS=num_heads, BLOCK_K=triton.next_power_of_2(num_heads), HEAD_SIZE=head_size,
            BLOCK_D=triton.next_power_of_2(head_size), MODE=MODE_NUMBER[replay.mode],
            QUANTIZE_K=replay.quantized != "v", QUANTIZE_V=replay.quantized != "k",
            num_warps=4, **({"enable_fp_fusion": False} if k_TKD.is_cuda else {}),
        )  # fmt: skip
    return ReplayedKV(k_out_TKD, v_out_TKD, k_scale, v_scale)
