"""RMSNorm of each head of gated DeltaNet's output, times a gate.

    rstd = 1 / sqrt(mean(o^2) + eps)                            float32
    y    = round((o rstd) weight (z sigmoid(z)))                one rounding to the model's dtype

A head is summed in one fixed tree in one program, whatever the number of tokens. The CPU form sums in float64.

    n = o rstd,  c = z sigmoid(z),  h = dy c weight
    do = rstd (h - n mean(h n))     dz = dy n weight c'     dweight = sum of dy n c over tokens and heads

T tokens, H value heads, V head size, R rows (T * H).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from octetrl.kernels.delta_rule.chunk_tiles import levels, tree_sum
from octetrl.kernels.instructions import sigmoid
from octetrl.kernels.rows.rms_norm_backward import row_starts, sum_partials

TILE_ELEMENTS = 2048  # of the rows that a program processes at a time
PROGRAMS = 264  # of the backward; fixed, so that the bits of the weight's gradient do not depend on the device


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    o_ptr, z_ptr, weight_ptr, y_ptr, num_rows, num_heads, stride_o_token, stride_o_head, stride_z_token, stride_z_head,
    eps, SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, LEVELS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column_C = tl.arange(0, BLOCK_C)
    inside_RC = (row_R < num_rows)[:, None] & (column_C < SIZE)[None, :]
    o_R = row_starts(row_R, num_heads, stride_o_token, stride_o_head)
    z_R = row_starts(row_R, num_heads, stride_z_token, stride_z_head)
    o_RC = tl.load(o_ptr + o_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
    z_RC = tl.load(z_ptr + z_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
    weight_C = tl.load(weight_ptr + column_C, mask=column_C < SIZE, other=0.0).to(tl.float32)
    rstd_R = tl.rsqrt(tree_sum(o_RC * o_RC, BLOCK_R, BLOCK_C, LEVELS) * (1.0 / SIZE) + eps)
    y_RC = o_RC * rstd_R[:, None] * weight_C[None, :] * (z_RC * sigmoid(z_RC, ON_GPU))
    y_ptr_RC = y_ptr + row_R[:, None] * SIZE + column_C[None, :]
    tl.store(y_ptr_RC, y_RC.to(y_ptr.dtype.element_ty), mask=inside_RC)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_backward_kernel(
    dy_ptr, o_ptr, z_ptr, weight_ptr, do_ptr, dz_ptr, partial_ptr, num_rows, num_heads,
    stride_dy_token, stride_dy_head, stride_o_token, stride_o_head, stride_z_token, stride_z_head, eps,
    SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, PROGRAMS: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column_C = tl.arange(0, BLOCK_C)
    inside_C = column_C < SIZE
    weight_C = tl.load(weight_ptr + column_C, mask=inside_C, other=0.0).to(tl.float32)
    dweight_RC = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for first in range(program * BLOCK_R, num_rows, PROGRAMS * BLOCK_R):
        row_R = first + tl.arange(0, BLOCK_R).to(tl.int64)
        inside_RC = (row_R < num_rows)[:, None] & inside_C[None, :]
        dy_R = row_starts(row_R, num_heads, stride_dy_token, stride_dy_head)
        o_R = row_starts(row_R, num_heads, stride_o_token, stride_o_head)
        z_R = row_starts(row_R, num_heads, stride_z_token, stride_z_head)
        dy_RC = tl.load(dy_ptr + dy_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        o_RC = tl.load(o_ptr + o_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        z_RC = tl.load(z_ptr + z_R[:, None] + column_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        sigmoid_RC = sigmoid(z_RC, ON_GPU)
        gated_RC = dy_RC * (z_RC * sigmoid_RC)
        h_RC = gated_RC * weight_C[None, :]
        squares_R, products_R = tl.reduce((o_RC * o_RC, h_RC * o_RC), 1, _add)
        rstd_R = tl.rsqrt(squares_R * (1.0 / SIZE) + eps)
        normed_RC = o_RC * rstd_R[:, None]
        do_RC = (h_RC - normed_RC * (products_R * rstd_R * (1.0 / SIZE))[:, None]) * rstd_R[:, None]
        slope_RC = sigmoid_RC * (1.0 + z_RC * (1.0 - sigmoid_RC))
        dz_RC = dy_RC * normed_RC * weight_C[None, :] * slope_RC
        dweight_RC += gated_RC * normed_RC
        out_RC = row_R[:, None] * SIZE + column_C[None, :]
        tl.store(do_ptr + out_RC, do_RC.to(do_ptr.dtype.element_ty), mask=inside_RC)
        tl.store(dz_ptr + out_RC, dz_RC.to(dz_ptr.dtype.element_ty), mask=inside_RC)
    tl.store(partial_ptr + program * SIZE + column_C, tl.sum(dweight_RC, 0), mask=inside_C)


def _tile(size: int) -> dict[str, int]:
    block_c = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK_C": block_c, "BLOCK_R": max(1, TILE_ELEMENTS // block_c), "num_warps": 4}


def gated_rms_norm_triton(o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """The forward kernel's launcher."""
    num_tokens, num_heads, size = o_THV.shape
    y_THV = torch.empty(o_THV.shape, dtype=o_THV.dtype, device=o_THV.device)
    tile, num_rows = _tile(size), num_tokens * num_heads
    if num_rows:
        _gated_rms_norm_kernel[(triton.cdiv(num_rows, tile["BLOCK_R"]),)](
            o_THV, z_THV, weight_V, y_THV, num_rows, num_heads, *o_THV.stride()[:2], *z_THV.stride()[:2], eps,
            LEVELS=levels(tile["BLOCK_C"]), ON_GPU=o_THV.is_cuda, **tile,
            **({"enable_fp_fusion": False} if o_THV.is_cuda else {}),
        )  # fmt: skip
    return y_THV


def gated_rms_norm_backward_triton(
    dy_THV: Tensor, o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward kernel's launcher."""
    num_tokens, num_heads, size = o_THV.shape
    dy_THV = dy_THV if dy_THV.stride(2) == 1 else dy_THV.contiguous()
    do_THV, dz_THV = (torch.empty(o_THV.shape, dtype=o_THV.dtype, device=o_THV.device) for _ in range(2))
    partial_PV = torch.empty(PROGRAMS, size, dtype=torch.float32, device=o_THV.device)
    _gated_rms_norm_backward_kernel[(PROGRAMS,)](
        dy_THV, o_THV, z_THV, weight_V, do_THV, dz_THV, partial_PV, num_tokens * num_heads, num_heads,
        *dy_THV.stride()[:2], *o_THV.stride()[:2], *z_THV.stride()[:2], eps,
        PROGRAMS=PROGRAMS, ON_GPU=o_THV.is_cuda, **_tile(size),
    )  # fmt: skip
    return do_THV, dz_THV, sum_partials(partial_PV, weight_V.dtype)


def gated_rms_norm_reference(o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """The forward in plain torch."""
    mean_TH1 = o_THV.double().square().mean(-1, keepdim=True).float()
    rstd_TH1 = (mean_TH1 + eps).double().rsqrt().float()
    normed_THV = (o_THV.float() * rstd_TH1) * weight_V.float()
    return (normed_THV * silu(z_THV.double()).float()).to(o_THV.dtype)


def gated_rms_norm_backward_reference(
    dy_THV: Tensor, o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward in plain torch, float32."""
    o, z, dy, weight = o_THV.float(), z_THV.float(), dy_THV.float(), weight_V.float()
    rstd = o.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed, sigmoid = o * rstd, z.sigmoid()
    gate = z * sigmoid
    h = dy * gate * weight
    do = rstd * (h - normed * (h * normed).mean(-1, keepdim=True))
    dz = dy * normed * weight * (sigmoid * (1.0 + z * (1.0 - sigmoid)))
    dweight_V = (dy * normed * gate).sum((0, 1))
    return do.to(o_THV.dtype), dz.to(z_THV.dtype), dweight_V.to(weight_V.dtype)


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(o_THV, z_THV, weight_V)
        ctx.eps = eps
        run = gated_rms_norm_triton if o_THV.is_cuda else gated_rms_norm_reference
        return run(o_THV, z_THV, weight_V, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        o_THV, z_THV, weight_V = ctx.saved_tensors
        return (*gated_rms_norm_backward(gradients[0], o_THV, z_THV, weight_V, ctx.eps), None)


def gated_rms_norm_backward(
    dy_THV: Tensor, o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """do and dz [T, H, V], contiguous, and dweight [V], each in the dtype of what it is the gradient of."""
    run = gated_rms_norm_backward_triton if o_THV.is_cuda else gated_rms_norm_backward_reference
    return run(dy_THV, o_THV, z_THV, weight_V, eps)


def gated_rms_norm(o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """y [T, H, V], contiguous. Differentiable in o, z and weight, which have one dtype; last axes contiguous."""
    assert o_THV.shape == z_THV.shape and o_THV.shape[-1:] == weight_V.shape, f"gated_rms_norm: {o_THV.shape}"
    assert o_THV.dtype == z_THV.dtype == weight_V.dtype, f"gated_rms_norm: {o_THV.dtype}, {z_THV.dtype}"
    y_THV: Tensor = _GatedRMSNorm.apply(o_THV, z_THV, weight_V, eps)
    return y_THV
