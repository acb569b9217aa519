"""Values of K and V as attention reads them, for the sites "k as cached" and "v as cached".

A value is code times scale in float32. Rollout reads the codes from the pages; training has the replayed codes.

T tokens, K kv heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.fp8.format import decode_e4m3, is_code
from octetrl.kernels.attention.kv_store import ReplayedKV, by_key
from octetrl.kernels.attention.records import CachedPages, Replay
from octetrl.layers.context import CacheTreatment, LayerCache


def values_of(kv: ReplayedKV) -> tuple[Tensor, Tensor]:
    """Values of replayed codes, float32 [T, K, D]."""
    return _scaled(kv.k_TKD, kv.k_scale), _scaled(kv.v_TKD, kv.v_scale)


def replay_of(k: CacheTreatment, v: CacheTreatment) -> Replay:
    if k.mode == v.mode:
        return Replay(k.mode, k.scale, v.scale)
    assert "none" in (k.mode, v.mode), f"K is treated as '{k.mode}' and V as '{v.mode}'"
    return Replay(v.mode, k.scale, v.scale, "v") if k.mode == "none" else Replay(k.mode, k.scale, v.scale, "k")


def read_back(cache: LayerCache, slot_mapping_T: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of these slots, read from their pages: float32 [T, K, D]."""
    k, v = cache.tensors
    page_size = k.pages.shape[2]
    page_T, offset_T = slot_mapping_T // page_size, slot_mapping_T % page_size

    def values(pages: Tensor, cached: CachedPages) -> Tensor:
        if not is_code(pages.dtype):
            return pages[page_T, :, offset_T].float()
        codes_TKD = pages.view(torch.uint8)[page_T, :, offset_T].view(pages.dtype)
        scale = cached.scale if cached.token_scale is None else cached.token_scale[page_T, :, offset_T]
        return _scaled(decode_e4m3(codes_TKD), scale)

    return values(k.pages, k), values(by_key(v.pages), v)


def saturated_of(cache: LayerCache, num_kv_heads: int) -> Tensor | None:
    """The counters of clamped values of K and V for the kernels: int64 [2, K], or [T, 2, K] with one for each token."""
    if cache.saturated_S is None:
        return None
    return cache.saturated_S[..., : 2 * num_kv_heads].unflatten(-1, (2, num_kv_heads))


def _scaled(codes_TKD: Tensor, scale: Tensor | None) -> Tensor:
    """`scale`: [K] of heads or [T, K] of tokens and heads; None: the values themselves."""
    return codes_TKD.float() if scale is None else codes_TKD.float() * scale[..., None]
