"""MLA's attention of packed training sequences, in the engine's order. Forward only: absorbed.py has the backward.

    out[t, h] = sum over keys j <= t of the same sequence of softmax_j(score[t, h, j]) * latent[j]
    score     = softmax_scale * (q_latent[t, h] . latent[j] + q_rotary[t, h] . key[j])

T tokens, B sequences, H heads, C latent size, R rotary size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from octetrl.kernels.attention.attention_reference import KVRows, PaddedGroup, attend_reference
from octetrl.kernels.attention.latent_order import LATENT_TILE
from octetrl.kernels.attention.latent_rows import latent_rows


def latent_packed(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    value_TC: Tensor,
    key_TR: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> Tensor:
    """out [T, H, C] in q's dtype. `value_TC`: latents as `latent_replay` returns them. cu_seqlens_B1: int32.

    BF16, or float32 on a CPU. Rows past `cu_seqlens_B1[-1]` are zero.
    """
    packed = latent_packed_triton if value_TC.is_cuda else latent_packed_reference
    return packed(q_latent_THC, q_rotary_THR, value_TC, key_TR, cu_seqlens_B1, max_seqlen, softmax_scale)


def latent_packed_triton(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    value_TC: Tensor,
    key_TR: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> Tensor:
    """By `latent_rows`, the kernel that also runs the engine's prefill."""
    tables = value_TC.contiguous(), key_TR.contiguous()
    return latent_rows(q_latent_THC, q_rotary_THR, *tables, cu_seqlens_B1, max_seqlen, softmax_scale)


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

    return attend_latents(q_latent_THC, q_rotary_THR, value_TC, key_TR, rows_of, bounds, lengths, softmax_scale)


def attend_latents(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    value_NC: Tensor,
    key_NR: Tensor,
    rows_of: Callable[[PaddedGroup], Tensor],
    bounds: tuple[int, ...],
    contexts: tuple[int, ...],
    softmax_scale: float,
) -> Tensor:
    """`attend_reference` with one kv head, K of width C + R and V of width C. Latents are BF16 values, or float32."""
    q_THX = torch.cat((q_latent_THC, q_rotary_THR), 2)
    kv = KVRows(torch.cat((value_NC, key_NR), 1), value_NC, tile=LATENT_TILE)
    return attend_reference(q_THX, kv, rows_of, bounds, contexts, softmax_scale, 1)[0]
