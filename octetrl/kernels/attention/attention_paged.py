"""Causal attention of new tokens over a paged KV cache: decode and chunked prefill, with one order of sums.

Sequence b has the queries `cu_seqlens_q[b] : cu_seqlens_q[b + 1]`; the last one sits at key `context_lens[b]
- 1`, and the keys of this very chunk are read from the cache too, so a prompt token meets the same quantised
K and V at prefill as at decode. Prefill is `attention_rows`, decode is `attention_decode`.

B sequences, P pages of the longest block table, T tokens, H query heads, K kv heads, D head size, S keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_decode import attention_decode_triton
from octetrl.kernels.attention.attention_order import KV_TILE
from octetrl.kernels.attention.attention_reference import KVRows, PaddedGroup, attend_reference
from octetrl.kernels.attention.attention_rows import attention_rows
from octetrl.kernels.attention.kv_store import by_key
from octetrl.kernels.attention.records import CachedPages
from octetrl.kernels.quantize.quantize_activation import quantize_activation


def attention_paged(
    q_THD: Tensor,
    k: CachedPages,
    v: CachedPages,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    max_query_len: int | None = None,
    quantize_out: bool = False,
    power_of_two: bool = False,
    window: int | None = None,
    draft_offset_B: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor | Quantized:
    """out [T, H, D] in q's dtype; with `quantize_out`, `quantize_activation(out.flatten(1), power_of_two)`.

    k, v: as in `kv_store`, each BF16, E4M3, int8 or (CPU) float32. block_table_BP: int32, padded with -1.
    cu_seqlens_q_B1, context_lens_B: int32. A context of 0 marks a padding sequence, whose rows are zero (codes 0, scale
    1). max_query_len: the largest number of queries of a sequence, 1 for pure decode; T if not given. window: a query
    reads so many keys, its own included; None: all. sinks_H: each head's sink.

    draft_offset_B: int64, for decode: how far behind its sequence's query the draft of row b lies; 0 in the sequence's
    own row. The rows of a sequence follow one another, with offsets 0, 1, 2 and so on, equal tables, and one key more
    each. On a GPU one program may serve several of them, with the same bits (`DraftLayout`). None: no drafts.
    """
    arguments = (q_THD, k, v, block_table_BP, cu_seqlens_q_B1, context_lens_B, softmax_scale)
    if q_THD.is_cuda:
        how = (max_query_len, quantize_out, power_of_two, window, draft_offset_B, sinks_H)
        return attention_paged_triton(*arguments, *how)
    out_THD = attention_paged_reference(*arguments, window=window, sinks_H=sinks_H)
    return quantize_activation(out_THD.flatten(1), power_of_two) if quantize_out else out_THD


def attention_paged_reference(
    q_THD: Tensor,
    k: CachedPages,
    v: CachedPages,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`attention_paged` in plain torch, by the CPU form of `attention_order`."""
    _, num_kv_heads, page_size, head_size = k.pages.shape
    used_U, renamed_BP = block_table_BP.clamp_min(0).unique(return_inverse=True)

    def table(cache: Tensor) -> Tensor:  # torch cannot index codes, but it can index bytes
        codes = cache.dtype == E4M3
        rows = (cache.view(torch.uint8) if codes else cache)[used_U.long()].reshape(-1, head_size)
        return rows.view(E4M3) if codes else rows

    def table_scale(scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.dim() == 1 else scale[used_U.long()]

    kv = KVRows(table(k.pages), table(by_key(v.pages)), table_scale(k.scale_in_use), table_scale(v.scale_in_use))

    def rows_of(piece: PaddedGroup) -> Tensor:
        page_JS = renamed_BP[piece.sequence_J[:, None], piece.key_JS // page_size]
        head_K = torch.arange(num_kv_heads)[:, None]
        return (page_JS[:, None] * num_kv_heads + head_K) * page_size + (piece.key_JS % page_size)[:, None]

    bounds, contexts = tuple(cu_seqlens_q_B1.tolist()), tuple(context_lens_B.tolist())
    return attend_reference(q_THD, kv, rows_of, bounds, contexts, softmax_scale, num_kv_heads, window, sinks_H)[0]


def attention_paged_triton(
    q_THD: Tensor,
    k: CachedPages,
    v: CachedPages,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    max_query_len: int | None = None,
    quantize_out: bool = False,
    power_of_two: bool = False,
    window: int | None = None,
    draft_offset_B: Tensor | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor | Quantized:
    """`attention_paged`: the decode kernel if every sequence has one query, else the rows kernel."""
    page_size, head_size = k.pages.shape[2:]
    assert KV_TILE % page_size == 0 or page_size % KV_TILE == 0, f"page size {page_size} does not fit the KV tile"
    shapes = k.pages.shape, v.pages.shape
    assert by_key(v.pages).shape == shapes[0], f"pages of K {shapes[0]} and V {shapes[1]} do not match"
    assert block_table_BP.stride(1) == 1, "attention_paged: rows of the block table must be contiguous"
    if max_query_len == 1:
        tables = (q_THD, k, v, block_table_BP, context_lens_B, softmax_scale)
        quantizes = quantize_out and head_size == BLOCK
        how: dict[str, Any] = {"window": window, "draft_offset_B": draft_offset_B, "sinks_H": sinks_H}
        out = attention_decode_triton(*tables, quantizes, power_of_two, **how)
        if isinstance(out, Quantized):
            return out
        out_THD = out
    else:
        longest = q_THD.shape[0] if max_query_len is None else max_query_len
        out_THD, _ = attention_rows(
            q_THD, k.pages, by_key(v.pages), cu_seqlens_q_B1, longest, softmax_scale, k.scale_in_use,
            v.scale_in_use, block_table_BP, context_lens_B, window, sinks_H=sinks_H,
        )  # fmt: skip
    return quantize_activation(out_THD.flatten(1), power_of_two) if quantize_out else out_THD
