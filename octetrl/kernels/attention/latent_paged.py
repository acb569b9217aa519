"""MLA's attention of new tokens over pages of latents: decode and chunked prefill, with one order of sums.

Sequence b has the queries `cu_seqlens_q[b] : cu_seqlens_q[b + 1]`; the last one is at key `context_lens[b] - 1`. The
latents of this chunk are read from the pages too, so a prompt token reads the same values at prefill as at decode.

T tokens, B sequences, P pages of the longest block table, H heads, C latent size, R rotary size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.attention_reference import PaddedGroup
from octetrl.kernels.attention.latent_decode import latent_decode
from octetrl.kernels.attention.latent_packed import attend_latents
from octetrl.kernels.attention.latent_rows import latent_rows
from octetrl.kernels.attention.latent_store import latent_values
from octetrl.kernels.attention.records import CachedPages


def latent_paged(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    latent: CachedPages,
    key: CachedPages,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    max_query_len: int | None = None,
) -> Tensor:
    """out [T, H, C] in q's dtype. Pages as in `latent_store`; block_table_BP: int32, padded with -1.

    cu_seqlens_q_B1, context_lens_B: int32. A context of 0 marks a padding sequence, whose rows are zero. max_query_len:
    the largest number of queries of a sequence, 1 for pure decode; T if not given.
    """
    operands, bounds = (q_latent_THC, q_rotary_THR, latent, key), (block_table_BP, cu_seqlens_q_B1, context_lens_B)
    if latent.pages.is_cuda:
        return latent_paged_triton(*operands, *bounds, softmax_scale, max_query_len)
    return latent_paged_reference(*operands, *bounds, softmax_scale)


def latent_paged_triton(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    latent: CachedPages,
    key: CachedPages,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    max_query_len: int | None = None,
) -> Tensor:
    """The decode kernel if every sequence has one query, else the rows kernel."""
    if max_query_len == 1:
        return latent_decode(q_latent_THC, q_rotary_THR, latent, key, block_table_BP, context_lens_B, softmax_scale)
    longest = len(q_latent_THC) if max_query_len is None else max_query_len
    return latent_rows(
        q_latent_THC, q_rotary_THR, latent.pages, key.pages, cu_seqlens_q_B1, longest, softmax_scale,
        latent.token_scale, block_table_BP, context_lens_B,
    )  # fmt: skip


def latent_paged_reference(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    latent: CachedPages,
    key: CachedPages,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
) -> Tensor:
    """`latent_paged` in plain torch."""
    page_size = latent.pages.shape[1]
    used_U, renamed_BP = block_table_BP.clamp_min(0).unique(return_inverse=True)
    used_U = used_U.long()
    key_NR = key.pages[used_U].flatten(0, 1)
    if latent.pages.dtype == E4M3:
        assert latent.token_scale is not None, "FP8 latents have a scale for each token"
        codes_NC = latent.pages.view(torch.uint8)[used_U].flatten(0, 1).view(E4M3)
        value_NC = latent_values(codes_NC, latent.token_scale[used_U].reshape(-1, 1))
    else:
        value_NC = latent.pages[used_U].flatten(0, 1)

    def rows_of(piece: PaddedGroup) -> Tensor:
        page_JS = renamed_BP[piece.sequence_J[:, None], piece.key_JS // page_size]
        return (page_JS * page_size + piece.key_JS % page_size)[:, None]

    bounds, contexts = tuple(cu_seqlens_q_B1.tolist()), tuple(context_lens_B.tolist())
    return attend_latents(q_latent_THC, q_rotary_THR, value_NC, key_NR, rows_of, bounds, contexts, softmax_scale)
