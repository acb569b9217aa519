"""Rotary position embedding, rotate-half as in Hugging Face: element r of a head is paired with r + D/2.

    y[r]       = x[r] * cos[r] - x[r + D/2] * sin[r]
    y[r + D/2] = x[r + D/2] * cos[r] + x[r] * sin[r]

cos and sin are float32 (layers/rotary.py computes them in float64, once). Products and sum are float32, each rounded
separately (no FMA), and the result is rounded once to x's dtype. transformers rounds cos and sin to BF16 first and so
cannot tell positions beyond 256 apart; here they stay distinct. Nothing is reduced, so CPU and GPU give the same bits.
The backward is the rotation by the opposite angle. x may be a view into the fused QKV output: only its last axis must
be contiguous.

`interleaved`: element 2r of x is paired with 2r + 1, as DeepSeek's weights need it. y has the order above; the score of
two rotated heads is the same. The backward takes this order and returns that of x.

If cos and sin have fewer than D/2 planes, only the first 2R elements of a head are rotated, and the others are copied.

T tokens, H heads, D head size, R = D/2 rotation planes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    num_heads,
    stride_token,
    stride_head,
    SIGN: tl.constexpr,
    X_STEP: tl.constexpr,
    Y_STEP: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_H = tl.arange(0, BLOCK_H)
    plane_R = tl.arange(0, BLOCK_R)
    inside_R = plane_R < PLANES
    inside_HR = (head_H < num_heads)[:, None] & inside_R[None, :]
    cos_R = tl.load(cos_ptr + token * PLANES + plane_R, mask=inside_R, other=0.0)
    sin_R = tl.load(sin_ptr + token * PLANES + plane_R, mask=inside_R, other=0.0) * SIGN
    source_HR = x_ptr + token * stride_token + head_H[:, None] * stride_head + plane_R[None, :] * X_STEP
    first_HR = tl.load(source_HR, mask=inside_HR, other=0.0).to(tl.float32)
    second_HR = tl.load(source_HR + (PLANES if X_STEP == 1 else 1), mask=inside_HR, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    target_HR = y_ptr + (token * num_heads + head_H[:, None]) * (2 * PLANES) + plane_R[None, :] * Y_STEP
    tl.store(target_HR, (first_HR * cos_R[None, :] - second_HR * sin_R[None, :]).to(dtype), mask=inside_HR)
    second_HR = second_HR * cos_R[None, :] + first_HR * sin_R[None, :]
    tl.store(target_HR + (PLANES if Y_STEP == 1 else 1), second_HR.to(dtype), mask=inside_HR)


def rope_triton(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, sign: int, interleaved: bool = False) -> Tensor:
    """The kernel's launcher; sign -1 rotates back. Returns a contiguous tensor like x."""
    num_tokens, num_heads, head_size = x_THD.shape
    rotated = 2 * cos_TR.shape[1]
    if rotated < head_size:
        rotated_THR = rope_triton(x_THD[..., :rotated], cos_TR, sin_TR, sign, interleaved)
        return torch.cat((rotated_THR, x_THD[..., rotated:]), dim=-1)
    assert x_THD.stride(2) == 1, f"rope: last axis has stride {x_THD.stride(2)}, must be 1"
    assert cos_TR.is_contiguous() and sin_TR.is_contiguous(), "rope: cos and sin must be contiguous"
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if num_tokens == 0:
        return y_THD
    options = {"enable_fp_fusion": False} if x_THD.is_cuda else {}
    _rope_kernel[(num_tokens,)](
        x_THD, cos_TR, sin_TR, y_THD, num_heads, x_THD.stride(0), x_THD.stride(1), SIGN=sign,
        X_STEP=2 if interleaved and sign > 0 else 1, Y_STEP=2 if interleaved and sign < 0 else 1,
        PLANES=head_size // 2, BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_R=triton.next_power_of_2(head_size // 2), **options,
    )  # fmt: skip
    return y_THD


def rope_reference(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, sign: int = 1, interleaved: bool = False) -> Tensor:
    """The same in plain torch, the same bits."""
    rotated = 2 * cos_TR.shape[1]
    if rotated < x_THD.shape[2]:
        rotated_THR = rope_reference(x_THD[..., :rotated], cos_TR, sin_TR, sign, interleaved)
        return torch.cat((rotated_THR, x_THD[..., rotated:]), dim=-1)
    x = x_THD.float()
    first_THR, second_THR = (x[..., 0::2], x[..., 1::2]) if interleaved and sign > 0 else x.chunk(2, dim=-1)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), (sin_TR * sign).unsqueeze(1)
    turned = (first_THR * cos_T1R - second_THR * sin_T1R, second_THR * cos_T1R + first_THR * sin_T1R)
    if interleaved and sign < 0:
        return torch.stack(turned, dim=-1).flatten(-2).to(x_THD.dtype)
    return torch.cat(turned, dim=-1).to(x_THD.dtype)


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, sign: int, interleaved: bool = False) -> Tensor:
    """`rope` without a gradient; sign -1 rotates back."""
    if x_THD.is_cuda:
        return rope_triton(x_THD, cos_TR, sin_TR, sign, interleaved)
    return rope_reference(x_THD, cos_TR, sin_TR, sign, interleaved)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos_TR, sin_TR)
        ctx.interleaved = interleaved
        return rotate(x_THD, cos_TR, sin_TR, 1, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos_TR, sin_TR = ctx.saved_tensors
        return rotate(grads[0].contiguous(), cos_TR, sin_TR, -1, ctx.interleaved), None, None, None


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each head by its token's angles. Differentiable in x.

    x_THD: BF16 or float32, D even, last axis contiguous. cos_TR, sin_TR: float32, contiguous, of at most D/2 planes.
    Returns x's shape and dtype.
    """
    fits = cos_TR.shape[0] == x_THD.shape[0] and 2 * cos_TR.shape[1] <= x_THD.shape[2]
    assert fits, f"rope: x {x_THD.shape}, cos {cos_TR.shape}"
    return _Rope.apply(x_THD, cos_TR, sin_TR, interleaved)
