"""The backward of RMSNorm over the last axis, for the residual stream [T, E] and for heads [T, H, C].

    xhat    = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)        recomputed from x
    g       = dy * weight
    dx      = rstd * (g - xhat * mean(g * xhat)) + residual      float32 throughout, one rounding to x's dtype
    dweight = sum over rows of dy * xhat

`residual` is the gradient that bypasses the norm (of h in h + f(norm(h))). Added here, it costs one read. A separate
elementwise kernel would need two reads and a write.

A fixed number of programs loops over the rows, each with its own float32 row of the weight's gradient in registers. A
second kernel adds these rows in one order. The sum therefore depends neither on the order of programs nor on the
device, and two runs give the same bits. Both means come from one reduction: mean(g * xhat) = rstd * mean(g * x). The
next rows are prefetched during the current ones (`STAGES`).

Bytes of an element: 2 of x, 2 of dy, 2 of the residual's gradient if given, 2 written. Rows whose stride is not a
multiple of 8 elements are correct too, only slower.

T tokens, H heads, E hidden size, C columns (E, or a head's), R rows of a tile, P partial sums, N columns of one sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # two for each of an H200's multiprocessors; fixed, so that the bits do not depend on the device
TILE_ELEMENTS = 4096  # of the rows that a program processes at a time
THREAD_ELEMENTS = 16
STAGES = 3
MAX_STAGED_BYTES = 1 << 15  # of a tile of one input; beyond it, two tiles of three inputs would not fit
SUM_COLUMNS = 16


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def row_starts(row_R, num_heads, stride_token, stride_head):
    return (row_R // num_heads) * stride_token + (row_R % num_heads) * stride_head


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    dy_ptr, x_ptr, weight_ptr, residual_ptr, dx_ptr, partial_ptr, num_rows, num_heads,
    stride_dy_token, stride_dy_head, stride_x_token, stride_x_head, stride_residual_token, stride_residual_head, eps,
    SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column_C = tl.arange(0, BLOCK_C)
    inside_C = column_C < SIZE
    weight_C = tl.load(weight_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
    dweight_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in tl.range(program * BLOCK_R, num_rows, PROGRAMS * BLOCK_R, num_stages=STAGES):
        row_R = first + tl.arange(0, BLOCK_R).to(tl.int64)
        inside_RC = (row_R < num_rows)[:, None] & inside_C[None, :]
        dy_R = row_starts(row_R, num_heads, stride_dy_token, stride_dy_head)
        x_R = row_starts(row_R, num_heads, stride_x_token, stride_x_head)
        dy_RC = tl.load(dy_ptr + dy_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        x_RC = tl.load(x_ptr + x_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        g_RC = dy_RC * weight_C[None, :]
        squares_R, products_R = tl.reduce((x_RC * x_RC, g_RC * x_RC), 1, _add)
        rstd_R = tl.rsqrt(squares_R * (1.0 / SIZE) + eps)
        mean_R = products_R * rstd_R * (1.0 / SIZE)
        xhat_RC = x_RC * rstd_R[:, None]
        dweight_RC += dy_RC * xhat_RC
        dx_RC = (g_RC - xhat_RC * mean_R[:, None]) * rstd_R[:, None]
        if RESIDUAL:
            residual_R = row_starts(row_R, num_heads, stride_residual_token, stride_residual_head)
            residual_RC = tl.load(residual_ptr + residual_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0)
            dx_RC += residual_RC.to(tl.float32)
        dx_ptr_RC = dx_ptr + row_R[:, None] * SIZE + column_C[None, :]
        tl.store(dx_ptr_RC, dx_RC.to(dx_ptr.dtype.element_ty), mask=inside_RC)
    tl.store(partial_ptr + program * SIZE + column_C, tl.sum(dweight_RC, 0), mask=inside_C)


@triton.jit
def _sum_partials_kernel(
    partial_ptr, sum_ptr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    row_P = tl.arange(0, BLOCK_P)
    column_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_PN = (row_P < ROWS)[:, None] & (column_N < SIZE)[None, :]
    partial_PN = tl.load(partial_ptr + row_P[:, None] * SIZE + column_N[None, :], mask=inside_PN, other=0.0)
    tl.store(sum_ptr + column_N, tl.sum(partial_PN, 0).to(sum_ptr.dtype.element_ty), mask=column_N < SIZE)


def sum_partials(partial_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of float32 rows, in one order, rounded once to `dtype`."""
    programs, size = partial_PC.shape
    sum_C = torch.empty(size, dtype=dtype, device=partial_PC.device)
    _sum_partials_kernel[(triton.cdiv(size, SUM_COLUMNS),)](
        partial_PC, sum_C, ROWS=programs, SIZE=size, BLOCK_P=triton.next_power_of_2(programs), BLOCK_N=SUM_COLUMNS,
        num_warps=8,
    )  # fmt: skip
    return sum_C


def _rows(x: Tensor) -> Tensor:
    """[T, H, C] with the last axis contiguous (autograd may pass an expanded gradient)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 3 else x.unsqueeze(1)


def rms_norm_backward_triton(
    dy: Tensor, x: Tensor, weight_C: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The kernels' launcher."""
    dy_THC, x_THC = _rows(dy), _rows(x)
    residual_THC = None if residual is None else _rows(residual)
    num_tokens, num_heads, size = x_THC.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_c = triton.next_power_of_2(size)
    block_r = max(1, TILE_ELEMENTS // block_c)
    partial_PC = torch.empty(PROGRAMS, size, dtype=torch.float32, device=x.device)
    stages = STAGES if block_r * block_c * x.element_size() <= MAX_STAGED_BYTES else 1
    residual_strides: Sequence[int] = (0, 0) if residual_THC is None else residual_THC.stride()[:2]
    _rms_norm_backward_kernel[(PROGRAMS,)](
        dy_THC, x_THC, weight_C, residual_THC, dx, partial_PC, num_tokens * num_heads, num_heads,
        *dy_THC.stride()[:2], *x_THC.stride()[:2], *residual_strides, eps,
        SIZE=size, BLOCK_C=block_c, BLOCK_R=block_r, PROGRAMS=PROGRAMS, STAGES=stages, RESIDUAL=residual is not None,
        num_warps=max(4, min(32, block_r * block_c // (32 * THREAD_ELEMENTS))),
        **({"enable_fp_fusion": False} if x.is_cuda else {}),
    )  # fmt: skip
    return dx, sum_partials(partial_PC, weight_C.dtype)


def rms_norm_backward_reference(
    dy: Tensor, x: Tensor, weight_C: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, float32."""
    xhat = x.float()
    rstd = xhat.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    xhat = xhat * rstd
    dweight_C = (dy.float() * xhat).reshape(-1, weight_C.numel()).sum(0)
    g = dy.float() * weight_C.float()
    dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)).mul_(rstd)
    if residual is not None:
        dx += residual.float()
    return dx.to(x.dtype), dweight_C.to(weight_C.dtype)


def rms_norm_backward(
    dy_TE: Tensor, x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of `rms_norm(x, weight, eps)`, plus `residual_TE` in dx. dx is contiguous, in x's dtype.

    dy, x and residual: all [T, C] or all [T, H, C], BF16 or float32, any strides of tokens and heads. dweight: in the
    weight's dtype.
    """
    assert dy_TE.shape == x_TE.shape and x_TE.dim() in (2, 3), f"rms_norm_backward: {dy_TE.shape} and {x_TE.shape}"
    assert x_TE.shape[-1] == weight_E.numel(), f"rms_norm_backward: {x_TE.shape} and {weight_E.shape}"
    assert residual_TE is None or residual_TE.shape == x_TE.shape, "rms_norm_backward: the residual has another shape"
    backward = rms_norm_backward_triton if x_TE.is_cuda else rms_norm_backward_reference
    return backward(dy_TE, x_TE, weight_E, eps, residual_TE)
