"""K and V as attention multiplies them, as values: the sites "k as cached" and "v as cached".

"As cached" is code times scale, float32: read back from the pages in the rollout, from the replayed codes in training.

T tokens, K kv heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3, decode_e4m3
from octetrl.kernels.attention.kv_store import ReplayedKV, by_key
from octetrl.layers.context import LayerCache


def values_of(kv: ReplayedKV) -> tuple[Tensor, Tensor]:
    """What replayed codes stand for, float32 [T, K, D]."""
    return _scaled(kv.k_TKD, kv.k_scale), _scaled(kv.v_TKD, kv.v_scale)


def read_back(cache: LayerCache, slot_mapping_T: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of these slots, out of their pages: float32 [T, K, D]."""
    page_size = cache.k.shape[2]
    page_T, offset_T = slot_mapping_T // page_size, slot_mapping_T % page_size

    def values(pages: Tensor, scale_K: Tensor | None, token_scale: Tensor | None) -> Tensor:
        if pages.dtype != E4M3:
            return pages[page_T, :, offset_T].float()
        codes_TKD = pages.view(torch.uint8)[page_T, :, offset_T].view(E4M3)
        scale = token_scale[page_T, :, offset_T] if token_scale is not None else scale_K
        return _scaled(decode_e4m3(codes_TKD), scale)

    return (
        values(cache.k, cache.k_scale_K, cache.k_token_scale),
        values(by_key(cache.v), cache.v_scale_K, cache.v_token_scale),
    )


def _scaled(codes_TKD: Tensor, scale: Tensor | None) -> Tensor:
    """`scale`: [K] of heads or [T, K] of tokens and heads; None: the values themselves."""
    return codes_TKD.float() if scale is None else codes_TKD.float() * scale[..., None]
