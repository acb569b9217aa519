"""The three GEMMs of `Float8Linear` under autograd; layers/linear.py says what is quantised when.

The input is saved in BF16, not as codes. The forward's codes have their blocks along K, and wgrad needs blocks along
tokens. Codes would mean a second quantisation in the forward, computed again wherever activations are recomputed. The
BF16 tensor may also be saved already, by attention as its output. If it is not, BF16 costs one byte more per element.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octetrl.fp8.backends import BackendName, fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad
from octetrl.fp8.quantize import Quantized, quantize_activation_values, quantize_tokens_values
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens

if TYPE_CHECKING:
    from octetrl.layers.linear import Float8Linear

ACTIVATION_QUANTIZERS: dict[BackendName, Callable[[Tensor, bool], Quantized]] = {
    "scaled_mm": quantize_activation,
    "emulated": quantize_activation_values,
}
_TOKEN_QUANTIZERS: dict[BackendName, Callable[[Tensor, bool, bool], Quantized]] = {
    "scaled_mm": quantize_tokens,
    "emulated": quantize_tokens_values,
}


class Float8LinearFunction(torch.autograd.Function):
    """y [M, N] of x [M, K]. `linear` holds the codes; the weight is an argument only for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor | None, bias_N: Tensor | None, linear: Float8Linear
    ) -> Tensor:
        # The weight is saved only so that autograd notices if it changes between forward and backward.
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.linear = linear
        x8 = ACTIVATION_QUANTIZERS[linear.backend](x_MK, linear.power_of_two)
        w8 = linear.forward_operand()
        if linear.backend == "scaled_mm":
            y_MN = fp8_gemm_nt(x8, w8, "scaled_mm", x_MK.dtype)
            return y_MN if bias_N is None else y_MN + bias_N
        y_MN = fp8_gemm_nt(x8, w8, "emulated", torch.float32 if bias_N is not None else x_MK.dtype)
        return y_MN if bias_N is None else y_MN.add_(bias_N).to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK = ctx.saved_tensors
        linear: Float8Linear = ctx.linear
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx_MK = dweight_NK = dbias_N = None
        if need_x:
            dy8 = ACTIVATION_QUANTIZERS[linear.backend](dy_MN, linear.power_of_two)
            dx_MK = fp8_gemm_dgrad(dy8, linear.dgrad_operand(), linear.backend, x_MK.dtype)
        if need_weight:
            quantize = _TOKEN_QUANTIZERS[linear.backend]
            dy8_NT = quantize(dy_MN, linear.power_of_two, False)
            x8_KT = quantize(x_MK, linear.power_of_two, linear.square_wgrad)
            dweight_NK = fp8_gemm_wgrad(dy8_NT, x8_KT, linear.backend, weight_NK.dtype)
        if need_bias:
            dbias_N = dy_MN.float().sum(0)
        return dx_MK, dweight_NK, dbias_N, None
