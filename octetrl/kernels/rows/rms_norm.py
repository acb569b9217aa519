"""RMSNorm of the last axis, for the residual stream [T, E] and for QK-norm [T, H, D].

    rstd = 1 / sqrt(mean(x^2) + eps)                float32
    y    = round(x * rstd) * weight                 both rounded to the model's dtype, as in transformers; with a
                                                    float32 weight (OffsetRMSNorm) only the result is

A row is summed in one fixed tree in one program, for any number of rows. A token therefore has the same bits in the
engine's batch and in the trainer's pack. Several short rows share a program, which does not affect their sums. The
input may be a view into the fused QKV output: only its last axis must be contiguous. The CPU form sums in float64 and
rounds at the kernel's points.

The backward (`rms_norm_backward.py`) recomputes rstd, so only x is kept.

T tokens, H heads, D head size, E hidden size, R rows (T * H), C columns (E or D).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward

PROGRAM_ELEMENTS = 4096  # of the rows that share one program
PIECE_ELEMENTS = 1 << 18  # of the rows that the CPU form processes at a time, so that float64 copies stay in cache


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    num_heads,
    stride_token,
    stride_head,
    eps,
    SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column_C = tl.arange(0, BLOCK_C)
    inside_RC = (row_R < num_rows)[:, None] & (column_C < SIZE)[None, :]
    start_R = (row_R // num_heads) * stride_token + (row_R % num_heads) * stride_head
    x_RC = tl.load(x_ptr + start_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
    rstd_R = tl.rsqrt(tl.sum(x_RC * x_RC, axis=1) * (1.0 / SIZE) + eps)
    dtype = y_ptr.dtype.element_ty
    xhat_RC = (x_RC * rstd_R[:, None]).to(weight_ptr.dtype.element_ty).to(tl.float32)
    weight_C = tl.load(weight_ptr + column_C, mask=column_C < SIZE, other=0.0).to(tl.float32)
    y_RC = (xhat_RC * weight_C[None, :]).to(dtype)
    tl.store(y_ptr + row_R[:, None] * SIZE + column_C[None, :], y_RC, mask=inside_RC)


def rms_norm_triton(x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """The kernel's launcher. x: [T, C] or [T, H, C], last axis contiguous. Returns a contiguous tensor."""
    x_THC = x if x.dim() == 3 else x.unsqueeze(1)
    num_tokens, num_heads, size = x_THC.shape
    assert x_THC.stride(2) == 1, f"rms_norm: last axis has stride {x_THC.stride(2)}, must be 1"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return y
    block_c = triton.next_power_of_2(size)
    block_r = max(1, PROGRAM_ELEMENTS // block_c)
    options = {"enable_fp_fusion": False} if x.is_cuda else {}
    _rms_norm_kernel[(triton.cdiv(num_rows, block_r),)](
        x_THC, weight_C, y, num_rows, num_heads, x_THC.stride(0), x_THC.stride(1), eps,
        SIZE=size, BLOCK_C=block_c, BLOCK_R=block_r, num_warps=8 if block_c > 1024 else 4, **options,
    )  # fmt: skip
    return y


def rms_norm_reference(x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """The same in plain torch: sums in float64, rounded at the kernel's points."""
    size = x.shape[-1]
    y_RC = torch.empty(x.numel() // size, size, dtype=x.dtype, device=x.device)
    rows = max(1, PIECE_ELEMENTS // size)
    for x_PC, y_PC in zip(x.reshape(-1, size).split(rows), y_RC.split(rows), strict=True):
        mean_P1 = x_PC.double().square_().mean(-1, keepdim=True).float()
        rstd_P1 = (mean_P1 + eps).double().rsqrt_().float()
        torch.mul((x_PC.float() * rstd_P1).to(weight_C.dtype), weight_C, out=y_PC)
    return y_RC.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight_C)
        ctx.eps = eps
        return rms_norm_triton(x, weight_C, eps) if x.is_cuda else rms_norm_reference(x, weight_C, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_C = ctx.saved_tensors
        dx, dweight_C = rms_norm_backward(grads[0], x, weight_C, ctx.eps)
        return dx, dweight_C, None


def rms_norm(x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis. Differentiable in x and weight.

    x: [T, C] or [T, H, C], BF16 or float32, last axis contiguous. weight_C: same dtype, or float32. Returns x's shape
    and dtype.
    """
    assert x.dim() in (2, 3) and x.shape[-1] == weight_C.numel(), f"rms_norm: {x.shape} and {weight_C.shape}"
    assert weight_C.dtype in (x.dtype, torch.float32), f"rms_norm: x is {x.dtype}, weight is {weight_C.dtype}"
    return _RMSNorm.apply(x, weight_C, eps)
