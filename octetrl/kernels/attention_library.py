"""The backward of `attention_packed` by a library in torch, fed with our own output and log-sum-exp.

    flash    FlashAttention-2's packed form. GQA without expanded K and V, no host read, capturable in a CUDA graph. It
             adds up dQ by atomics, so bits vary, unless torch.use_deterministic_algorithms(True) asks otherwise.
    cudnn    cuDNN's dense form, one call for each run of sequences of equal length. It reads the lengths on the host
             and builds a plan for every new length; torch leaves its atomics on, so it refuses determinism.

cuDNN's packed form is not offered: torch up to 2.12 takes the head size for the longest sequence in its backward, and
writes past a buffer wherever a sequence is longer (mended in pytorch/pytorch#186142).

Both want BF16 operands and one softmax scale for all heads, so codes can't go in with their scales beside them:
K' = code * scale and V' are rounded to BF16 once. That is exact where the scale is a power of two. Elsewhere a value
moves by up to 2^-8 of itself, by 2^-9 in the mean square, at random: dP by as much as rounding dS to BF16 does anyway,
but a score by about 2^-9 / sqrt(D) * |q| |k| * softmax_scale, and P = exp(s - lse) by that part of itself, while lse
comes from the scores before rounding. With D = 128 that is 0.2% of P where |q| |k| softmax_scale is 11 (unit variance),
and 2% where it is 100; rows of P then no longer sum to one exactly. Our own kernels (attention_packed_backward.py)
multiply the codes themselves and don't pay it.

T tokens, B sequences, S tokens of one sequence, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.kv_store import ReplayedKV

Library = Literal["flash", "cudnn"]
ROWS = 4  # that one program looks after when rows past the last sequence are zeroed


@triton.jit
def _zero_rest_gradient_kernel(
    x_ptr, cu_seqlens_ptr, num_sequences, num_tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    used = tl.load(cu_seqlens_ptr + num_sequences)
    first = tl.program_id(0) * ROWS
    if first + ROWS > used:
        row = first + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row >= used) & (row < num_tokens) & (column < WIDTH)
        tl.store(x_ptr + row.to(tl.int64) * WIDTH + column, 0.0, mask=inside)


def _zero_rest(x_THD: Tensor, cu_seqlens_B1: Tensor) -> Tensor:
    """x with zeros past `cu_seqlens_B1[-1]`, where a library leaves what was there; the host reads nothing."""
    x_THD = x_THD.contiguous()
    T, width = x_THD.shape[0], x_THD[0].numel()
    _zero_rest_gradient_kernel[(triton.cdiv(T, ROWS),)](
        x_THD, cu_seqlens_B1, cu_seqlens_B1.shape[0] - 1, T,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ROWS=ROWS,
    )  # fmt: skip
    return x_THD


def attention_packed_backward_library(
    dout_THD: Tensor,
    q_THD: Tensor,
    kv: ReplayedKV,
    out_THD: Tensor,
    lse2_TH: Tensor,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    *,
    which: Library,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [T, H, D], dK and dV [T, K, D] in BF16; zero where no sequence lies.

    `max_seqlen` must be at least the longest length. Raises ValueError where the library can't keep what is asked.
    """
    if q_THD.dtype != torch.bfloat16:
        raise ValueError(f"a library's attention backward takes BF16 here, not {q_THD.dtype}")
    if which == "cudnn" and torch.are_deterministic_algorithms_enabled():
        raise ValueError("cuDNN's attention backward in torch is not deterministic: choose flash, or our own")
    k_TKD, v_TKD = dequantized_bf16(kv.k_TKD, kv.k_scale), dequantized_bf16(kv.v_TKD, kv.v_scale)
    lse_TH = lse2_TH * math.log(2.0)
    operands = (dout_THD.contiguous(), q_THD, k_TKD, v_TKD, out_THD.contiguous(), lse_TH)
    if q_THD.shape[0] == 0:
        return torch.empty_like(q_THD), torch.empty_like(k_TKD), torch.empty_like(v_TKD)
    if which == "cudnn":
        return _cudnn(*operands, cu_seqlens_B1, softmax_scale)
    dq, dk, dv = _flash(*operands, cu_seqlens_B1, max_seqlen, softmax_scale)
    return _zero_rest(dq, cu_seqlens_B1), _zero_rest(dk, cu_seqlens_B1), _zero_rest(dv, cu_seqlens_B1)


def dequantized_bf16(x_TKD: Tensor, scale: Tensor | None) -> Tensor:
    """code * scale, in float32 and rounded once; values without a scale as they are."""
    if scale is None:
        return x_TKD.to(torch.bfloat16)
    return (x_TKD.float() * scale[..., None]).to(torch.bfloat16)  # [K] or [T, K]


def _flash(
    dout_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, lse_TH: Tensor,
    cu_seqlens_B1: Tensor, max_seqlen: int, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    unused = torch.empty(2, dtype=torch.uint64, device=q_THD.device)  # the state of dropout, of which there is none
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dout_THD, q_THD, k_TKD, v_TKD, out_THD, lse_TH.t().contiguous(), cu_seqlens_B1, cu_seqlens_B1,
        max_seqlen, max_seqlen, 0.0, True, unused, torch.empty(0, device=q_THD.device), scale=softmax_scale,
    )  # fmt: skip
    return gradients


@cache
def _lse_dims() -> int:
    """Of the log-sum-exp that this torch's cuDNN backward takes: [B, H, S], or with a last axis of one."""
    x = torch.empty(1, 1, 16, 64, dtype=torch.bfloat16, device="meta")
    lse: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1]
    return lse.dim()


def _cudnn(
    dout_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, lse_TH: Tensor,
    cu_seqlens_B1: Tensor, softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64, device=q_THD.device)
    gradients = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD, v_TKD))
    bounds = cu_seqlens_B1.tolist()
    start = 0
    for length, run in itertools.groupby(end - first for first, end in itertools.pairwise(bounds)):
        count = len(list(run))
        if length == 0:
            continue
        rows = slice(start, start + count * length)
        start = rows.stop

        def dense(x: Tensor, rows: slice = rows, length: int = length) -> Tensor:
            return x[rows].unflatten(0, (-1, length)).transpose(1, 2)  # [B, H, S, ...]

        lse = dense(lse_TH[..., None]).contiguous()
        batch = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(dense(x) for x in (dout_THD, q_THD, k_TKD, v_TKD, out_THD)), lse if _lse_dims() == 4 else lse[..., 0],
            seed, seed, None, None, None, length, length, 0.0, True, scale=softmax_scale,
        )  # fmt: skip
        for gradient, part in zip(gradients, batch, strict=True):
            gradient[rows] = part.transpose(1, 2).flatten(0, 1)
    dq, dk, dv = gradients
    return dq, dk, dv
