"""K and V into their pages, and the same codes for a trainer that has no pages.

`kv_store` writes one token's K and V (after QK-norm and RoPE) into the paged caches `[num_pages, K,
page_size, D]` at `slot = page * page_size + offset`; slot -1 is skipped, so padded batches need no branch.
One kv head of one page is one contiguous `[page_size, D]` matrix: what an attention tile loads.

    calibrated   inverse = 1 / scale[head];   code = e4m3(clamp(x * inverse, -448, 448))
    dynamic      amax over the head's D;      scale and inverse by the rule of every block (fp8/quantize.py)
    none         the value, cast to the cache's dtype

x is rounded to BF16 first. Divisions are IEEE float32 (`div_rn`), so the bytes are those of the reference.
NaN stays NaN (0x7f), never a finite code. Values past the calibrated range are clamped and counted per head
in `saturated_2K` (row 0 K, row 1 V), NaN among them.

`kv_replay` quantises by the same rule and returns the codes already converted, exactly, to the dtype in which
the training forward multiplies them (`attention_order.operand_dtype`): once a layer is faster than inside the
kernel.

T tokens, K kv heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3, E4M3_MAX, decode_e4m3
from octetrl.fp8.quantize import quantize_kv_per_head, quantize_kv_per_token
from octetrl.kernels.attention_order import KVMode, operand_dtype


def kv_mode_of(cache: Tensor, head_scale_K: Tensor | None, token_scale: Tensor | None) -> KVMode:
    """How a cache is scaled, told by its dtype and by the scales given; an E4M3 cache without scales is refused."""
    if cache.dtype != E4M3:
        return "none"
    if (head_scale_K is None) == (token_scale is None):
        raise ValueError(
            "an FP8 KV cache needs either per-head scales (calibrated) or per-token scales (dynamic)"
        )
    return "calibrated" if head_scale_K is not None else "dynamic"


def kv_store(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    saturated_2K: Tensor | None = None,
) -> None:
    """Write K and V at their slots, in place.

    k_TKD, v_TKD: [T, K, D], last axis contiguous. k_cache, v_cache: [num_pages, K, page_size, D].
    slot_mapping_T: int64, -1 skips. Per-head scales: float32 [K]. Per-token scales: float32 [num_pages, K,
    page_size], written here. saturated_2K: int64 counter, added to. Raises ValueError for an FP8 cache
    without scales.
    """
    caches = (k_cache, v_cache, slot_mapping_T)
    scales = (k_scale_K, v_scale_K, k_token_scale, v_token_scale, saturated_2K)
    store = kv_store_triton if k_TKD.is_cuda else kv_store_reference
    store(k_TKD, v_TKD, *caches, *scales)


def kv_store_reference(
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    saturated_2K: Tensor | None = None,
) -> None:
    """`kv_store` in plain torch."""
    kept_T = slot_mapping_T >= 0
    slot_T = slot_mapping_T[kept_T].long()
    page_T, offset_T = slot_T // k_cache.shape[2], slot_T % k_cache.shape[2]
    both = ((k_TKD, k_cache, k_scale_K, k_token_scale), (v_TKD, v_cache, v_scale_K, v_token_scale))
    for which, (x_TKD, cache, head_scale_K, token_scale) in enumerate(both):
        mode = kv_mode_of(cache, head_scale_K, token_scale)
        x_TKD = x_TKD[kept_T]
        if mode == "none":
            cache[page_T, :, offset_T] = x_TKD.to(cache.dtype)
            continue
        if head_scale_K is not None:
            codes = quantize_kv_per_head(x_TKD, head_scale_K).codes
            if saturated_2K is not None:
                saturated_2K[which] += saturated_count(x_TKD, head_scale_K)
        else:
            assert token_scale is not None
            codes, scale_TK = quantize_kv_per_token(x_TKD)
            token_scale[page_T, :, offset_T] = scale_TK
        cache.view(torch.uint8)[page_T, :, offset_T] = codes.view(torch.uint8)


def saturated_count(x_TKD: Tensor, scale_K: Tensor) -> Tensor:
    """How many values of each head lie past the calibrated range (or are NaN): int64 [K]."""
    inverse_K = torch.div(torch.ones_like(scale_K), scale_K)
    scaled = x_TKD.to(torch.bfloat16).float() * inverse_K[None, :, None]
    return (~(scaled.abs() <= E4M3_MAX)).sum(dim=(0, 2))


class ReplayedKV(NamedTuple):
    """K and V as the attention kernels multiply them: codes without their scales, in the operand dtype [T, K, D]."""

    k_TKD: Tensor
    v_TKD: Tensor
    k_scale_TK: Tensor | None  # "dynamic" only
    v_scale_TK: Tensor | None


def kv_replay(
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv_mode: KVMode,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
) -> ReplayedKV:
    """K and V put through the cache's quantiser. `none`: as they are; `calibrated` needs the float32 scales [K]."""
    if kv_mode == "none":
        return ReplayedKV(k_TKD, v_TKD, None, None)
    if kv_mode == "calibrated" and (k_scale_K is None or v_scale_K is None):
        raise ValueError("KV replay with calibrated scales was asked for, but no scales were given")
    return (kv_replay_triton if k_TKD.is_cuda else kv_replay_reference)(
        k_TKD, v_TKD, kv_mode, k_scale_K, v_scale_K
    )


def kv_replay_reference(
    k_TKD: Tensor, v_TKD: Tensor, kv_mode: KVMode, k_scale_K: Tensor | None, v_scale_K: Tensor | None
) -> ReplayedKV:
    """`kv_replay` in plain torch."""
    operand = operand_dtype(E4M3, kv_mode)
    if k_scale_K is not None and v_scale_K is not None:
        k_codes = quantize_kv_per_head(k_TKD, k_scale_K).codes
        v_codes = quantize_kv_per_head(v_TKD, v_scale_K).codes
        return ReplayedKV(decode_e4m3(k_codes, operand), decode_e4m3(v_codes, operand), None, None)
    k_codes, k_scale_TK = quantize_kv_per_token(k_TKD)
    v_codes, v_scale_TK = quantize_kv_per_token(v_TKD)
    return ReplayedKV(decode_e4m3(k_codes, operand), decode_e4m3(v_codes, operand), k_scale_TK, v_scale_TK)
