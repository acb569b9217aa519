"""Causal attention of new tokens over a paged KV cache: decode and chunked prefill, with one order of sums.

Sequence b has the queries `cu_seqlens_q[b] : cu_seqlens_q[b + 1]`; the last one sits at key `context_lens[b]
- 1`, and the keys of this very chunk are read from the cache too, so a prompt token meets the same quantised
K and V at prefill as at decode.

B sequences, P pages of the longest block table, T tokens, H query heads, K kv heads, D head size, S keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.kernels.attention_order import KVRows, Piece, attend_reference, head_scales, operand_dtype
from octetrl.kernels.kv_store import kv_mode_of


def attention_paged(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """out [T, H, D] in q's dtype.

    k_cache, v_cache: [num_pages, K, page_size, D], BF16, E4M3 or (CPU) float32. block_table_BP: int32, -1
    padded. cu_seqlens_q_B1, context_lens_B: int32; a context of 0 marks a padding sequence, whose rows come
    back as zeros. Scales as in `kv_store`. max_query_len: longest query run, 1 for pure decode; without it T
    - B + 1 is assumed.
    """
    scales = (k_scale_K, v_scale_K, k_token_scale, v_token_scale)
    arguments = (
        q_THD,
        k_cache,
        v_cache,
        block_table_BP,
        cu_seqlens_q_B1,
        context_lens_B,
        softmax_scale,
        *scales,
    )
    if q_THD.is_cuda:
        return attention_paged_triton(*arguments, max_query_len)
    return attention_paged_reference(*arguments)


def attention_paged_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
) -> Tensor:
    """`attention_paged` in plain torch, by the CPU form of the order."""
    _, num_kv_heads, page_size, head_size = k_cache.shape
    kv_mode = kv_mode_of(k_cache, k_scale_K, k_token_scale)
    calibrated, dynamic = kv_mode == "calibrated", kv_mode == "dynamic"
    kv = KVRows(
        k_cache.view(-1, head_size),
        v_cache.view(-1, head_size),
        k_token_scale.view(-1) if dynamic and k_token_scale is not None else None,
        v_token_scale.view(-1) if dynamic and v_token_scale is not None else None,
    )

    def rows_of(piece: Piece) -> Tensor:
        page_JS = block_table_BP[piece.sequence_J[:, None], piece.key_JS // page_size].long()
        head_K = torch.arange(num_kv_heads)[:, None]
        return (page_JS[:, None] * num_kv_heads + head_K) * page_size + (piece.key_JS % page_size)[:, None]

    out_THD, _ = attend_reference(
        q_THD,
        kv,
        rows_of,
        tuple(cu_seqlens_q_B1.tolist()),
        tuple(context_lens_B.tolist()),
        head_scales(softmax_scale, k_scale_K if calibrated else None, num_kv_heads, q_THD.device),
        v_scale_K if calibrated else None,
        operand_dtype(k_cache.dtype, kv_mode),
    )
    return out_THD
