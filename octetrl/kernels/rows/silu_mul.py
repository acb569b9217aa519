"""SiLU(gate) * up, the middle of the gated MLP, from the fused output [T, 2F]: gate first, then up.

    y = round(gate * sigmoid(gate) * up)        float32 inside, one rounding to the model's dtype

transformers rounds SiLU(gate) to BF16 before the product. One rounding is closer to the formula, and the fused
quantiser uses the same value. The op is elementwise, so no order of sums matters. The CPU form computes the sigmoid in
float64: torch's float32 `silu` differs in the last bit between the vectorised body and the scalar tail of its loop, so
a token's bits would depend on its place in the batch.

    dgate = dy * up * s * (1 + gate * (1 - s)),  dup = dy * gate * s,  s = sigmoid(gate)     float32

T tokens, F intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from octetrl.kernels.instructions import sigmoid
from octetrl.kernels.programmatic_launch import let_next_start, lets_next_start

BLOCK_F = 1024
PIECE_ELEMENTS = 1 << 16  # of the rows that the CPU form processes at a time, so that float64 copies stay in cache


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, y_ptr, SIZE: tl.constexpr, ON_GPU: tl.constexpr, BLOCK_F: tl.constexpr, EARLY: tl.constexpr
):
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = column_F < SIZE
    gate_F = tl.load(gate_up_ptr + token * (2 * SIZE) + column_F, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_up_ptr + token * (2 * SIZE) + SIZE + column_F, mask=inside_F, other=0.0)
    y_F = gate_F * sigmoid(gate_F, ON_GPU) * up_F.to(tl.float32)
    tl.store(y_ptr + token * SIZE + column_F, y_F.to(y_ptr.dtype.element_ty), mask=inside_F)


@triton.jit
def _silu_mul_backward_kernel(
    gate_up_ptr, dy_ptr, dgate_up_ptr, SIZE: tl.constexpr, ON_GPU: tl.constexpr, BLOCK_F: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = column_F < SIZE
    gate_offset_F = token * (2 * SIZE) + column_F
    gate_F = tl.load(gate_up_ptr + gate_offset_F, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_up_ptr + gate_offset_F + SIZE, mask=inside_F, other=0.0).to(tl.float32)
    dy_F = tl.load(dy_ptr + token * SIZE + column_F, mask=inside_F, other=0.0).to(tl.float32)
    sigmoid_F = sigmoid(gate_F, ON_GPU)
    dgate_F = dy_F * up_F * sigmoid_F * (1.0 + gate_F * (1.0 - sigmoid_F))
    dup_F = dy_F * gate_F * sigmoid_F
    dtype = dgate_up_ptr.dtype.element_ty
    tl.store(dgate_up_ptr + gate_offset_F, dgate_F.to(dtype), mask=inside_F)
    tl.store(dgate_up_ptr + gate_offset_F + SIZE, dup_F.to(dtype), mask=inside_F)


def _grid(num_tokens: int, size: int) -> tuple[int, int]:
    return num_tokens, triton.cdiv(size, BLOCK_F)


def silu_mul_triton(gate_up_T2F: Tensor) -> Tensor:
    """The forward kernel's launcher. gate_up_T2F contiguous. Returns [T, F]."""
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    y_TF = torch.empty(num_tokens, size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    on_gpu = gate_up_T2F.is_cuda
    options = {"enable_fp_fusion": False} if on_gpu else {}
    if num_tokens:
        _silu_mul_kernel[_grid(num_tokens, size)](
            gate_up_T2F, y_TF, SIZE=size, ON_GPU=on_gpu, BLOCK_F=BLOCK_F, EARLY=lets_next_start(gate_up_T2F), **options
        )
    return y_TF


def silu_mul_backward_triton(gate_up_T2F: Tensor, dy_TF: Tensor) -> Tensor:
    """The backward kernel's launcher. Both contiguous. Returns the gradient of gate_up, [T, 2F]."""
    num_tokens, size = dy_TF.shape
    dgate_up_T2F = torch.empty_like(gate_up_T2F)
    if num_tokens:
        on_gpu = dy_TF.is_cuda
        options = {"enable_fp_fusion": False} if on_gpu else {}  # silu_mul_backward_quantize has the same bits
        _silu_mul_backward_kernel[_grid(num_tokens, size)](
            gate_up_T2F, dy_TF, dgate_up_T2F, SIZE=size, ON_GPU=on_gpu, BLOCK_F=BLOCK_F, **options
        )
    return dgate_up_T2F


def silu_mul_reference(gate_up_T2F: Tensor) -> Tensor:
    """The forward in plain torch."""
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    y_TF = torch.empty(num_tokens, size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    rows = max(1, PIECE_ELEMENTS // size)
    for gate_up_P2F, y_PF in zip(gate_up_T2F.split(rows), y_TF.split(rows), strict=True):
        gate_PF, up_PF = gate_up_P2F.chunk(2, dim=-1)
        y_PF.copy_(silu(gate_PF.double()).float() * up_PF.float())
    return y_TF


def silu_mul_backward_reference(gate_up_T2F: Tensor, dy_TF: Tensor) -> Tensor:
    """The backward in plain torch, float32, a piece at a time so that temporaries stay in the cache."""
    size = dy_TF.shape[1]
    dgate_up_T2F = torch.empty_like(gate_up_T2F)
    rows = max(1, PIECE_ELEMENTS // size)
    for gate_up_P2F, dy_PF, out_P2F in zip(*(x.split(rows) for x in (gate_up_T2F, dy_TF, dgate_up_T2F)), strict=True):
        gate_PF, up_PF = gate_up_P2F.float().chunk(2, dim=-1)
        sigmoid_PF, dy_PF = gate_PF.sigmoid(), dy_PF.float()
        slope_PF = sigmoid_PF * (1.0 + gate_PF * (1.0 - sigmoid_PF))
        out_P2F[:, :size] = slope_PF.mul_(up_PF).mul_(dy_PF)
        out_P2F[:, size:] = sigmoid_PF.mul_(gate_PF).mul_(dy_PF)
    return dgate_up_T2F


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        return silu_mul_triton(gate_up_T2F) if gate_up_T2F.is_cuda else silu_mul_reference(gate_up_T2F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        return silu_mul_backward(gate_up_T2F, grads[0].contiguous())


def silu_mul_backward(gate_up_T2F: Tensor, dy_TF: Tensor) -> Tensor:
    """The gradient of gate_up [T, 2F]. Both contiguous. No gradient."""
    run = silu_mul_backward_triton if gate_up_T2F.is_cuda else silu_mul_backward_reference
    return run(gate_up_T2F, dy_TF)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """SiLU of the first half times the second half. Differentiable. Takes a contiguous tensor; returns [T, F]."""
    assert gate_up_T2F.is_contiguous() and gate_up_T2F.shape[1] % 2 == 0, f"silu_mul: {gate_up_T2F.shape}"
    return _SiluMul.apply(gate_up_T2F)
