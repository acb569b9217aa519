"""The clamped gate of gpt-oss's experts, from the fused output [T, 2F]: gate first, then up.

    g = min(gate, 7),  u = min(max(up, -7), 7)
    y = round((u + 1) * g * sigmoid(1.702 g))        float32 inside, one rounding to the model's dtype

    dgate = dy * (u + 1) * s * (1 + 1.702 g (1 - s)) where gate <= 7,   dup = dy * g * s where |up| <= 7
    s = sigmoid(1.702 g); elsewhere 0                                                            float32

`clamped_glu_quantize` is y and the codes of `quantize_activation(y)` in one kernel, with the bytes of the two calls.
What silu_mul.py and silu_mul_quantize.py say of orders, of a CPU's sigmoid and of tiles holds here too. NaN stays NaN.

T tokens, F intermediate size, N blocks of a tile, C columns of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.instructions import bf16_to_float, e4m3_code, sigmoid, to_bf16
from octetrl.kernels.quantize.quantize_activation import block_scale, empty_rows, magnitude_bits, scale_rows
from octetrl.kernels.rows.silu_mul import BLOCK_F, PIECE_ELEMENTS
from octetrl.kernels.rows.silu_mul_quantize import TILES

SLOPE, LIMIT = 1.702, 7.0
_SLOPE, _LIMIT = tl.constexpr(SLOPE), tl.constexpr(LIMIT)


@triton.jit
def _gated(gate, up, ON_GPU: tl.constexpr):
    """y in float32, and g, u and s of the module's docstring."""
    g = tl.where(gate > _LIMIT, _LIMIT, gate)
    u = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
    s = sigmoid(g * _SLOPE, ON_GPU)
    return (u + 1.0) * (g * s), g, u, s


@triton.jit
def _clamped_glu_kernel(gate_up_ptr, y_ptr, SIZE: tl.constexpr, ON_GPU: tl.constexpr, BLOCK_F: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = column_F < SIZE
    gate_ptr_F = gate_up_ptr + token * (2 * SIZE) + column_F
    gate_F = tl.load(gate_ptr_F, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_ptr_F + SIZE, mask=inside_F, other=0.0).to(tl.float32)
    y_F, _, _, _ = _gated(gate_F, up_F, ON_GPU)
    tl.store(y_ptr + token * SIZE + column_F, y_F.to(y_ptr.dtype.element_ty), mask=inside_F)


@triton.jit(do_not_specialize=["num_tokens"])
def _clamped_glu_quantize_kernel(
    gate_up_ptr, code_ptr, scale_ptr, num_tokens,
    SIZE: tl.constexpr, OF_TOKEN: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    number_N = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token_N, block_N = (number_N // OF_TOKEN).to(tl.int64), number_N % OF_TOKEN
    has_token_N = token_N < num_tokens
    column_NC = block_N[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_NC = tl.max_contiguous(column_NC, (1, 8))
    inside_NC = has_token_N[:, None] & (column_NC < SIZE)
    gate_ptr_NC = gate_up_ptr + token_N[:, None] * (2 * SIZE) + column_NC
    gate_NC = bf16_to_float(tl.load(gate_ptr_NC, mask=inside_NC, other=0.0), ON_GPU)
    up_NC = bf16_to_float(tl.load(gate_ptr_NC + SIZE, mask=inside_NC, other=0.0), ON_GPU)
    y_NC, _, _, _ = _gated(gate_NC, up_NC, ON_GPU)
    y_NC = bf16_to_float(to_bf16(y_NC, ON_GPU), ON_GPU)
    scale_N, inverse_N = block_scale(tl.max(magnitude_bits(y_NC), 1), POWER_OF_TWO)
    code_NC = e4m3_code(y_NC * inverse_N[:, None], ON_GPU)
    tl.store(code_ptr + token_N[:, None] * SIZE + column_NC, code_NC, mask=inside_NC)
    tl.store(scale_ptr + block_N.to(tl.int64) * scale_rows(num_tokens) + token_N, scale_N, mask=has_token_N)


@triton.jit
def _clamped_glu_backward_kernel(
    gate_up_ptr, dy_ptr, dgate_up_ptr, SIZE: tl.constexpr, ON_GPU: tl.constexpr, BLOCK_F: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = column_F < SIZE
    offset_F = token * (2 * SIZE) + column_F
    gate_F = tl.load(gate_up_ptr + offset_F, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_up_ptr + offset_F + SIZE, mask=inside_F, other=0.0).to(tl.float32)
    dy_F = tl.load(dy_ptr + token * SIZE + column_F, mask=inside_F, other=0.0).to(tl.float32)
    _, g_F, u_F, s_F = _gated(gate_F, up_F, ON_GPU)
    dgate_F = dy_F * (u_F + 1.0) * s_F * (1.0 + _SLOPE * g_F * (1.0 - s_F))
    dgate_F = tl.where(gate_F > _LIMIT, 0.0, dgate_F)
    dup_F = tl.where(tl.abs(up_F) > _LIMIT, 0.0, dy_F * g_F * s_F)
    dtype = dgate_up_ptr.dtype.element_ty
    tl.store(dgate_up_ptr + offset_F, dgate_F.to(dtype), mask=inside_F)
    tl.store(dgate_up_ptr + offset_F + SIZE, dup_F.to(dtype), mask=inside_F)


def clamped_glu_triton(gate_up_T2F: Tensor) -> Tensor:
    """The forward kernel's launcher."""
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    y_TF = torch.empty(num_tokens, size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if num_tokens:
        _clamped_glu_kernel[(num_tokens, triton.cdiv(size, BLOCK_F))](
            gate_up_T2F, y_TF, SIZE=size, ON_GPU=gate_up_T2F.is_cuda, BLOCK_F=BLOCK_F, **_options(gate_up_T2F)
        )
    return y_TF


def clamped_glu_quantize_triton(gate_up_T2F: Tensor, power_of_two: bool = False) -> Quantized:
    """The quantising kernel's launcher."""
    num_tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    codes, scale = empty_rows(num_tokens, size, gate_up_T2F.device)
    columns = next((columns for columns in TILES if size % columns == 0), min(TILES))
    of_token = triton.cdiv(size, BLOCK)
    if num_tokens:
        _clamped_glu_quantize_kernel[(triton.cdiv(num_tokens * of_token, columns // BLOCK),)](
            gate_up_T2F, codes, scale, num_tokens, SIZE=size, OF_TOKEN=of_token, BLOCKS=columns // BLOCK, BLOCK=BLOCK,
            POWER_OF_TWO=power_of_two, ON_GPU=gate_up_T2F.is_cuda, num_warps=TILES[columns], **_options(gate_up_T2F),
        )  # fmt: skip
    return Quantized(codes.view(E4M3), scale)


def clamped_glu_backward_triton(gate_up_T2F: Tensor, dy_TF: Tensor) -> Tensor:
    """The backward kernel's launcher."""
    num_tokens, size = dy_TF.shape
    dgate_up_T2F = torch.empty_like(gate_up_T2F)
    if num_tokens:
        _clamped_glu_backward_kernel[(num_tokens, triton.cdiv(size, BLOCK_F))](
            gate_up_T2F, dy_TF, dgate_up_T2F, SIZE=size, ON_GPU=dy_TF.is_cuda, BLOCK_F=BLOCK_F, **_options(dy_TF)
        )
    return dgate_up_T2F


def _options(x: Tensor) -> dict[str, Any]:
    return {"enable_fp_fusion": False} if x.is_cuda else {}


def clamped_glu_reference(gate_up_T2F: Tensor) -> Tensor:
    """The forward in plain torch."""
    size = gate_up_T2F.shape[1] // 2
    y_TF = torch.empty(len(gate_up_T2F), size, dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    rows = max(1, PIECE_ELEMENTS // size)
    for gate_up_P2F, y_PF in zip(gate_up_T2F.split(rows), y_TF.split(rows), strict=True):
        gate_PF, up_PF = gate_up_P2F.chunk(2, dim=-1)
        g_PF = gate_PF.double().clamp(max=LIMIT)
        u_PF = up_PF.float().clamp(-LIMIT, LIMIT)
        y_PF.copy_((u_PF + 1.0) * (g_PF * (g_PF * SLOPE).sigmoid()).float())
    return y_TF


def clamped_glu_backward_reference(gate_up_T2F: Tensor, dy_TF: Tensor) -> Tensor:
    """The backward in plain torch, float32."""
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    g_TF, u_TF, dy_TF = gate_TF.clamp(max=LIMIT), up_TF.clamp(-LIMIT, LIMIT), dy_TF.float()
    s_TF = (g_TF * SLOPE).sigmoid()
    dgate_TF = dy_TF * (u_TF + 1.0) * s_TF * (1.0 + SLOPE * g_TF * (1.0 - s_TF))
    dup_TF = (dy_TF * g_TF * s_TF).masked_fill_(up_TF.abs() > LIMIT, 0.0)
    return torch.cat([dgate_TF.masked_fill_(gate_TF > LIMIT, 0.0), dup_TF], -1).to(gate_up_T2F.dtype)


class _ClampedGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_T2F)
        return clamped_glu_triton(gate_up_T2F) if gate_up_T2F.is_cuda else clamped_glu_reference(gate_up_T2F)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        return clamped_glu_backward(gate_up_T2F, grads[0].contiguous())


def clamped_glu(gate_up_T2F: Tensor) -> Tensor:
    """y [T, F], differentiable. Takes a contiguous tensor."""
    assert gate_up_T2F.is_contiguous() and gate_up_T2F.shape[1] % 2 == 0, f"clamped_glu: {gate_up_T2F.shape}"
    y_TF: Tensor = _ClampedGlu.apply(gate_up_T2F)
    return y_TF


def clamped_glu_quantize(gate_up_T2F: Tensor, power_of_two: bool = False) -> Quantized:
    """[T, 2F] contiguous -> codes [T, F] E4M3, scale [T, ceil(F/128)] float32 (CUDA: strides (1, roundup(T, 4)))."""
    assert gate_up_T2F.is_contiguous() and gate_up_T2F.shape[1] % 2 == 0, f"clamped_glu_quantize: {gate_up_T2F.shape}"
    if gate_up_T2F.is_cuda:
        return clamped_glu_quantize_triton(gate_up_T2F, power_of_two)
    return quantize_activation_reference(clamped_glu_reference(gate_up_T2F), power_of_two)


def clamped_glu_backward(gate_up_T2F: Tensor, dy_TF: Tensor) -> Tensor:
    """The gradient of gate_up [T, 2F]. Both contiguous. No gradient."""
    run = clamped_glu_backward_triton if gate_up_T2F.is_cuda else clamped_glu_backward_reference
    return run(gate_up_T2F, dy_TF)
