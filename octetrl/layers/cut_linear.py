"""`Linear` and `Float8Linear` of which each tensor-parallel worker owns some rows (layers/tensor_group.py).

    y[M, L] = x[M, K] W[L, K]^T       qkv, gate_up: x is whole on every worker, and y stays cut
    x gathered, y gathered            o_proj, down_proj (`joins`): x comes cut by columns, y leaves whole

The input is gathered as FP8 codes and scales, one byte a value, where the linear is FP8, otherwise in BF16. An adapter
reads BF16. Blocks of codes do not cross workers, so codes of the parts are the codes of the whole. A row's sum over K
is that of one worker, and so are its bits.

Backward: dx = dy W is a sum over the split rows, added in float32 in the order of ranks and rounded once. dW = dy^T x
is each worker's own, with x gathered again. Of an adapter dt = s dy B is added in the same way; then A's gradient is
equal on all workers, and B's rows are each worker's own.

On a GPU the forward's products add along K in the order of the whole model's, whatever the width of the part: the plain
loop of `bf16_gemm_straight`, and `fp8_gemm`. A bias is added after the product is rounded, as there.

M tokens, K in_features, N rows of all workers, L rows of one, R rank of an adapter, P its parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octetrl.fp8.backends import fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad
from octetrl.fp8.quantize import Quantized, quantize_activation_values, quantize_tokens_values
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight
from octetrl.kernels.gemm.fp8_gemm import fp8_gemm
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.layers.linear import Float8Linear
from octetrl.layers.lora import add_branch, lora_dgrad, lora_down, lora_dt, lora_wgrad
from octetrl.layers.tensor_group import (
    TensorGroup,
    join_codes,
    join_columns,
    join_rows,
    own_columns,
    sum_over,
    sum_own_columns,
)
from octetrl.layers.unquantized_linear import Linear, exact_product


class CutLinear(Linear):
    """Rows of a `Linear`. `in_features` is the whole K; x has [..., K], or this worker's columns if `joins`."""

    def __init__(self, *arguments: Any, group: TensorGroup, joins: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group, self.joins = group, joins

    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x)


class CutFloat8Linear(Float8Linear):
    """Rows of a `Float8Linear`, with the codes of the whole weight."""

    def __init__(self, *arguments: Any, group: TensorGroup, joins: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.group, self.joins = group, joins

    def forward(self, x: Tensor) -> Tensor:
        self.check_codes()
        return _product(self, x)


CutProjection = CutLinear | CutFloat8Linear


def joined_operand(linear: Linear | Float8Linear, own: Tensor | Quantized) -> Tensor | Quantized:
    """The operand of a linear's product in the rollout: whole, where it comes cut by columns."""
    if not isinstance(linear, CutProjection) or not linear.joins:
        return own
    return join_codes(linear.group, own) if isinstance(own, Quantized) else join_columns(linear.group, own)


def joined_result(linear: Linear | Float8Linear, own_ML: Tensor) -> Tensor:
    """The result of a linear's product in the rollout: whole, where workers join their parts."""
    if not isinstance(linear, CutProjection) or not linear.joins:
        return own_ML
    return join_columns(linear.group, own_ML)


def _product(linear: CutProjection, x: Tensor) -> Tensor:
    adapter = linear.lora
    a, b = (None, None) if adapter is None else (adapter.a, adapter.b)
    y_MN: Tensor = _CutFunction.apply(x.reshape(-1, x.shape[-1]), linear.weight, linear.bias, a, b, linear)
    return y_MN.view(*x.shape[:-1], y_MN.shape[1])


class _CutFunction(torch.autograd.Function):
    """Weight, bias and adapter are arguments only for their gradients, and so that autograd notices their changes."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        weight_LK: Tensor | None,
        bias_L: Tensor | None,
        a_PRK: Tensor | None,
        b_LR: Tensor | None,
        linear: CutProjection,
    ) -> Tensor:
        whole_MK = _gathered(linear, x_MK) if linear.lora is not None or isinstance(linear, Linear) else None
        if isinstance(linear, Float8Linear):
            y_ML = _float8_rows(linear, x_MK, whole_MK)
        else:
            assert whole_MK is not None
            y_ML = _rows(linear, whole_MK)
        t_MPR = None
        if linear.lora is not None:
            assert whole_MK is not None
            t_MPR = lora_down(linear.lora, whole_MK)
            add_branch(linear.lora, y_ML, t_MPR)
        ctx.save_for_backward(x_MK, weight_LK, a_PRK, b_LR, t_MPR)
        ctx.linear = linear
        return join_columns(linear.group, y_ML) if linear.joins else y_ML

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_LK, _, _, t_MPR = ctx.saved_tensors
        linear: CutProjection = ctx.linear
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dy_ML = own_columns(linear.group, grads[0]).contiguous() if linear.joins else grads[0].contiguous()
        dx_MK = _dgrad(linear, dy_ML).to(x_MK.dtype) if need_x else None
        da_PRK = db_LR = None
        if linear.lora is not None:
            dt_MPR = sum_over(linear.group, lora_dt(linear.lora, dy_ML))
            da_PRK, db_LR = lora_wgrad(linear.lora, dy_ML, _gathered(linear, x_MK), t_MPR, dt_MPR)
            if dx_MK is not None:
                of_branch_MK = lora_dgrad(linear.lora, dt_MPR, x_MK.dtype)
                dx_MK += own_columns(linear.group, of_branch_MK) if linear.joins else of_branch_MK
        dweight_LK = _wgrad(linear, dy_ML, x_MK).to(weight_LK.dtype) if need_weight else None
        dbias_L = dy_ML.float().sum(0) if need_bias else None
        return dx_MK, dweight_LK, dbias_L, da_PRK, db_LR, None


def _gathered(linear: CutProjection, x_MK: Tensor) -> Tensor:
    return join_columns(linear.group, x_MK) if linear.joins else x_MK


def _rows(linear: CutLinear, whole_MK: Tensor) -> Tensor:
    """y [M, L] without the adapter."""
    if not whole_MK.is_cuda:
        return exact_product(whole_MK, linear.weight, linear.bias)
    y_ML = bf16_gemm_straight(whole_MK.contiguous(), linear.weight.detach())
    return y_ML if linear.bias is None else y_ML + linear.bias


def _float8_rows(linear: CutFloat8Linear, x_MK: Tensor, whole_MK: Tensor | None) -> Tensor:
    """y [M, L] without the adapter. `whole_MK`: the whole input, if it was gathered already."""
    if whole_MK is not None or not linear.joins:
        x8 = _quantized(linear, x_MK if whole_MK is None else whole_MK)
    else:
        x8 = join_codes(linear.group, quantize_activation(x_MK.contiguous(), linear.power_of_two))
    if linear.backend != "emulated":
        y_ML = fp8_gemm(x8, linear.forward_operand())
        return y_ML if linear.bias is None else y_ML + linear.bias
    dtype = x_MK.dtype if linear.bias is None else torch.float32
    y_ML = fp8_gemm_nt(x8, linear.forward_operand(), linear.backend, dtype)
    return y_ML if linear.bias is None else y_ML.add_(linear.bias).to(x_MK.dtype)


def _quantized(linear: CutFloat8Linear, x_MK: Tensor) -> Quantized:
    """The operand of the forward or of dgrad: codes, or their values where the GEMM is emulated."""
    quantize = quantize_activation_values if linear.backend == "emulated" else quantize_activation
    return quantize(x_MK.contiguous(), linear.power_of_two)


def _quantized_tokens(linear: CutFloat8Linear, x_TK: Tensor, square: bool = False) -> Quantized:
    """The same of wgrad."""
    quantize = quantize_tokens_values if linear.backend == "emulated" else quantize_tokens
    return quantize(x_TK.contiguous(), linear.power_of_two, square)


def _dgrad(linear: CutProjection, dy_ML: Tensor) -> Tensor:
    """dx, float32: of the whole input, or of this worker's columns if it `joins`."""
    if isinstance(linear, Float8Linear):
        dy8 = _quantized(linear, dy_ML)
        partial_MK = fp8_gemm_dgrad(dy8, linear.dgrad_operand(), linear.backend, torch.float32)
    else:
        partial_MK = _float_product(dy_ML, linear.weight.detach())
    return (sum_own_columns if linear.joins else sum_over)(linear.group, partial_MK)


def _wgrad(linear: CutProjection, dy_ML: Tensor, x_MK: Tensor) -> Tensor:
    if not isinstance(linear, Float8Linear):
        return _float_product(dy_ML.t(), _gathered(linear, x_MK))
    dy8 = _quantized_tokens(linear, dy_ML)
    if linear.joins:
        own = quantize_tokens(x_MK.contiguous(), linear.power_of_two, linear.square_wgrad)
        codes_KM = join_rows(linear.group, own.codes.view(torch.uint8)).view(own.codes.dtype)
        x8 = Quantized(codes_KM, join_rows(linear.group, own.scale))
    else:
        x8 = _quantized_tokens(linear, x_MK, linear.square_wgrad)
    return fp8_gemm_wgrad(dy8, x8, linear.backend, torch.float32)


def _float_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a b with float32 sums and result."""
    if a_MK.is_cuda and a_MK.dtype == torch.bfloat16:
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return a_MK.float() @ b_KN.float()
