"""The gradient of attention's sinks, from what the forward kept (attention_order.py, attention_packed.py).

    dsink[h] = - sum over t of exp2(sink[h] * log2(e) - lse2[t, h]) * (dO[t, h] . O[t, h])

A program adds up the tokens of a block for one head, and the blocks' sums are added afterwards. There are no atomics,
so a gradient's bits repeat. Rows outside every sequence have an output of zero and add nothing.

T tokens, H query heads, D head size, B blocks of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.attention.attention_order import LOG2E, SINK_SCALE

BLOCK_T = 128


@triton.jit(do_not_specialize=["num_tokens"])
def _sink_gradient_kernel(
    dout_ptr, out_ptr, lse2_ptr, sink_ptr, sum_ptr, num_tokens,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d_D = tl.arange(0, BLOCK_D)
    row_T = token_T.to(tl.int64) * HEADS + head
    inside_TD = (token_T < num_tokens)[:, None] & (d_D < HEAD_SIZE)[None, :]
    offset_TD = row_T[:, None] * HEAD_SIZE + d_D[None, :]
    dout_TD = tl.load(dout_ptr + offset_TD, mask=inside_TD, other=0.0).to(tl.float32)
    out_TD = tl.load(out_ptr + offset_TD, mask=inside_TD, other=0.0).to(tl.float32)
    lse2_T = tl.load(lse2_ptr + row_T, mask=token_T < num_tokens, other=0.0)
    weight_T = tl.exp2(tl.load(sink_ptr + head).to(tl.float32) * SINK_SCALE - lse2_T)
    delta_T = tl.where(token_T < num_tokens, weight_T * tl.sum(dout_TD * out_TD, 1), 0.0)
    tl.store(sum_ptr + tl.program_id(0) * HEADS + head, tl.sum(delta_T, 0))


def sink_gradient_triton(dout_THD: Tensor, out_THD: Tensor, lse2_TH: Tensor, sinks_H: Tensor) -> Tensor:
    """The launcher."""
    tokens, heads, head_size = out_THD.shape
    blocks = triton.cdiv(tokens, BLOCK_T)
    sum_BH = torch.zeros(max(blocks, 1), heads, dtype=torch.float32, device=out_THD.device)
    if tokens:
        _sink_gradient_kernel[(blocks, heads)](
            dout_THD, out_THD, lse2_TH, sinks_H, sum_BH, tokens,
            HEADS=heads, HEAD_SIZE=head_size, BLOCK_D=triton.next_power_of_2(head_size), BLOCK_T=BLOCK_T, num_warps=4,
            **({"enable_fp_fusion": False} if out_THD.is_cuda else {}),
        )  # fmt: skip
    return sum_BH.sum(0).neg_().to(sinks_H.dtype)


def sink_gradient_reference(dout_THD: Tensor, out_THD: Tensor, lse2_TH: Tensor, sinks_H: Tensor) -> Tensor:
    """In plain torch, in float32."""
    delta_TH = (dout_THD.float() * out_THD.float()).sum(-1)
    weight_TH = (sinks_H.float() * LOG2E - lse2_TH).exp2()
    return (weight_TH * delta_TH).sum(0).neg_().to(sinks_H.dtype)


def sink_gradient(dout_THD: Tensor, out_THD: Tensor, lse2_TH: Tensor, sinks_H: Tensor) -> Tensor:
    """[H] in the dtype of `sinks_H`, from the gradient of attention's output. Rows past all sequences are zero in
    `out_THD`."""
    run = sink_gradient_triton if out_THD.is_cuda else sink_gradient_reference
    return run(dout_THD.contiguous(), out_THD.contiguous(), lse2_TH, sinks_H)
