"""MLA's attention in plain torch, packed and paged: the CPU form of the order in `latent_order`.

    score[t, h, j] = softmax_scale * (q_latent[t, h] . latent[j] + q_rotary[t, h] . key[j])        keys j <= t
    out[t, h]      = sum over j of softmax_j(score) * latent[j]

Every head reads the same latents, as keys and as values: `attend_reference` with one kv head, K of width C + R and V of
width C. Latents are BF16 values, or float32; codes become values before (`latent_store`).

B sequences, P pages of the longest block table, T tokens, H heads, C latent size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.attention_reference import KVRows, PaddedGroup, attend_reference
from octetrl.kernels.attention.latent_order import LATENT_TILE
from octetrl.kernels.attention.latent_store import latent_values
from octetrl.kernels.attention.records import CachedPages


def latent_packed_reference(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    value_TC: Tensor,
    key_TR: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> Tensor:
    """`latent_packed` in plain torch."""
    bounds = tuple(cu_seqlens_B1.tolist())
    lengths = tuple(end - start for start, end in pairwise(bounds))
    assert max(lengths, default=0) <= max_seqlen, f"a sequence has {max(lengths)} tokens, max_seqlen is {max_seqlen}"

    def rows_of(piece: PaddedGroup) -> Tensor:
        return (cu_seqlens_B1[piece.sequence_J, None].long() + piece.key_JS)[:, None]

    return _attend(q_latent_THC, q_rotary_THR, value_TC, key_TR, rows_of, bounds, lengths, softmax_scale)


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
    return _attend(q_latent_THC, q_rotary_THR, value_NC, key_NR, rows_of, bounds, contexts, softmax_scale)


def _attend(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    value_NC: Tensor,
    key_NR: Tensor,
    rows_of: Callable[[PaddedGroup], Tensor],
    bounds: tuple[int, ...],
    contexts: tuple[int, ...],
    softmax_scale: float,
) -> Tensor:
    q_THX = torch.cat((q_latent_THC, q_rotary_THR), 2)
    kv = KVRows(torch.cat((value_NC, key_NR), 1), value_NC, tile=LATENT_TILE)
    return attend_reference(q_THX, kv, rows_of, bounds, contexts, softmax_scale, 1)[0]
