"""The gradient of latent attention on a GPU, over keys and values of every head. Deterministic: no atomics.

absorbed.py computes those keys and values from the latents. A head's key is N elements of its own and R that all heads
share; its value has V elements. Nothing is copied or padded: every tile comes by TMA from where it lies.

    rows     one program per block of queries and head; loops over the keys. Computes the log-sum-exp of the scores and
             delta = sum over keys of P * dP, in float32, and stores both as [2 H, T]
    dQ       one program per block of queries and head; loops over the keys
    dK, dV   one program per block of keys and head; loops over the queries

        S = scale * Q K^T      P = exp2(S - lse2)      dP = dO V^T      dS = P * (dP - delta)
        dV = P^T dO            dQ = scale * dS K       dK = scale * dS^T Q

delta is often computed as the sum of dO * O. O is rounded to BF16, so the rows of dS would not add up to zero, and dQ
would have that error times the mean key: 5% and more if keys have much in common. The first kernel has no such error.
It costs what computing O again would cost.

Blocks, programs and masks are those of attention_packed_backward.py: each sequence is processed from its first token,
tiles without masked elements run in a loop without a mask, and what a tile reads of the next sequence is masked before
it is multiplied into a stored row.

I query rows, J keys of a block, T tokens, B sequences, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.kernels.attention.attention_packed import attention_packed_backward, attention_packed_forward
from octetrl.kernels.attention.attention_packed_backward import ALIGN, Tile
from octetrl.kernels.attention.kv_store import ReplayedKV
from octetrl.kernels.attention.latent_backward_kernels import (
    LatentGradients,
    LatentOperands,
    _dkdv_kernel,
    _dq_kernel,
    _rows_kernel,
    descriptor,
    for_tma,
)
from octetrl.kernels.gluon import COMPILER_ERRORS, give_up
from octetrl.kernels.gluon import can_run as gluon_can_run
from octetrl.shapes.sizes import ordinary_head_size


class LatentTiles(NamedTuple):
    rows: Tile
    dq: Tile
    dkdv: Tile


TILES = LatentTiles(rows=Tile(128, 64, 8, 3), dq=Tile(128, 64, 8, 3), dkdv=Tile(32, 128, 8, 3))


def can_run(nope: int, rotary: int, value: int) -> bool:
    """Whether the kernels take heads of these sizes. Larger ones have too many accumulators for the registers."""
    return nope in (64, 128) and rotary in (32, 64) and value in (64, 128)


def latent_backward(
    dout_THV: Tensor,
    q_THN: Tensor,
    q_THR: Tensor,
    kv_THX: Tensor,
    key_TR: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> LatentGradients:
    """Gradients of queries, of keys and values by head, and of the shared key. Zero outside every sequence.

    `kv_THX` [T, H, N + V]: keys without their shared part, then values. BF16, or float32 on a CPU; cu_seqlens int32.
    """
    arguments = dout_THV, q_THN, q_THR, kv_THX, key_TR, cu_seqlens_B1
    if q_THN.is_cuda and can_run(q_THN.shape[2], q_THR.shape[2], dout_THV.shape[2]):
        return latent_backward_triton(*arguments, softmax_scale)
    return latent_backward_reference(*arguments, max_seqlen, softmax_scale)


def latent_backward_reference(
    dout_THV: Tensor,
    q_THN: Tensor,
    q_THR: Tensor,
    kv_THX: Tensor,
    key_TR: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
) -> LatentGradients:
    """By ordinary attention on queries, keys and values that are padded to one head size. On a GPU its kernels run."""
    nope, value = q_THN.shape[2], dout_THV.shape[2]
    width = nope + q_THR.shape[2]
    size = ordinary_head_size(max(width, value))
    k_THX = torch.cat((kv_THX[..., :nope], key_TR[:, None].expand(-1, q_THN.shape[1], -1)), 2)
    q_THD, k_THD, v_THD, dout_THD = (
        F.pad(x_TH, (0, size - x_TH.shape[2]))
        for x_TH in (torch.cat((q_THN, q_THR), 2), k_THX, kv_THX[..., nope:], dout_THV)
    )
    bounds = cu_seqlens_B1, max_seqlen
    out_THD, lse2_TH = attention_packed_forward(q_THD, k_THD, v_THD, *bounds, softmax_scale)
    kv = ReplayedKV(k_THD, v_THD, None, None)
    dq_THD, dk_THD, dv_THD = attention_packed_backward(dout_THD, q_THD, kv, out_THD, lse2_TH, *bounds, softmax_scale)
    dkv_THX = torch.cat((dk_THD[..., :nope], dv_THD[..., :value]), 2)
    return LatentGradients(dq_THD[..., :width], dkv_THX, dk_THD[..., nope:width])


def latent_backward_triton(
    dout_THV: Tensor,
    q_THN: Tensor,
    q_THR: Tensor,
    kv_THX: Tensor,
    key_TR: Tensor,
    cu_seqlens_B1: Tensor,
    softmax_scale: float,
    *,
    gluon: bool = True,
    tiles: LatentTiles = TILES,
) -> LatentGradients:
    """`latent_backward` by the kernels, for BF16. `gluon`: whether Gluon may run."""
    q_THN, q_THR, dout_THV, kv_THX, key_T1R = map(for_tma, (q_THN, q_THR, dout_THV, kv_THX, key_TR[:, None]))
    (T, H, N), R, V = q_THN.shape, q_THR.shape[2], dout_THV.shape[2]
    assert q_THN.dtype == torch.bfloat16, f"the backward of latent attention takes BF16, not {q_THN.dtype}"
    assert can_run(N, R, V), f"heads of {N} + {R} and {V} elements"
    found = LatentGradients(*(q_THN.new_empty(T, H, size) for size in (N + R, N + V, R)))
    if T == 0:
        return found
    length = (T // ALIGN.value + cu_seqlens_B1.shape[0]) * ALIGN.value
    rows = q_THN.new_empty(2 * H, length, dtype=torch.float32)
    operands = LatentOperands(q_THN, q_THR, dout_THV, kv_THX[..., :N], key_T1R, kv_THX[..., N:], rows, cu_seqlens_B1)
    if not (gluon and R == 64 and _run_gluon(operands, found, softmax_scale)):
        _run_triton(operands, found, softmax_scale, tiles)
    return found


def _run_gluon(operands: LatentOperands, found: LatentGradients, softmax_scale: float) -> bool:
    """Whether it ran."""
    if not gluon_can_run("latent_backward_gluon", *operands):
        return False
    try:
        from octetrl.kernels.attention.latent_backward_gluon import latent_backward_gluon

        latent_backward_gluon(operands, found, softmax_scale)
    except COMPILER_ERRORS as error:
        give_up("latent_backward_gluon", error)
        return False
    return True


def _run_triton(operands: LatentOperands, found: LatentGradients, softmax_scale: float, tiles: LatentTiles) -> None:
    numbers, rows, cu_seqlens_B1 = operands.numbers(softmax_scale), operands.rows, operands.cu_seqlens_B1

    def descriptors(tile: Tile) -> list[TensorDescriptor]:
        by_query = [descriptor(x, tile.queries) for x in operands.by_query]
        return by_query + [descriptor(x, tile.keys) for x in operands.by_key]

    _rows_kernel[operands.grid(tiles.rows.queries)](
        *descriptors(tiles.rows), rows, cu_seqlens_B1, *numbers, **operands.shape, **tiles.rows.launch
    )
    _dq_kernel[operands.grid(tiles.dq.queries)](
        *descriptors(tiles.dq), rows, found.q_THX, cu_seqlens_B1, *numbers, **operands.shape, **tiles.dq.launch
    )
    by_row = TensorDescriptor(rows, list(rows.shape), [rows.stride(0), 1], [1, tiles.dkdv.queries])
    _dkdv_kernel[operands.grid(tiles.dkdv.keys)](
        *descriptors(tiles.dkdv), by_row, found.kv_THX, found.key_THR, cu_seqlens_B1, *numbers, **operands.shape,
        **tiles.dkdv.launch,
    )  # fmt: skip
