"""Products with small matrices whose result stays float32: a router's logits, a decay's. The weight is never FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight


class Float32Product(nn.Module):
    """x W^T + bias in float32. weight [X, E], and bias [X] if any, in the model's dtype."""

    def __init__(
        self,
        rows: int,
        columns: int,
        has_bias: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device).normal_(std=columns**-0.5))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype, device=device)) if has_bias else None

    def forward(self, x_TE: Tensor) -> Tensor:
        product_TX: Tensor = _Product.apply(x_TE, self.weight, self.bias)
        return product_TX


class _Product(torch.autograd.Function):
    """Forward adds E in one order at any number of tokens; backward in float32."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, weight_XE: Tensor, bias_X: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TE, weight_XE)
        product_TX = bf16_gemm_straight(x_TE.contiguous(), weight_XE, torch.float32)
        return product_TX if bias_X is None else product_TX.add_(bias_X)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, weight_XE = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dx_TE, dweight_XE = product_backward(grads[0], x_TE, weight_XE, need_x, need_weight)
        return dx_TE, dweight_XE, grads[0].sum(0).to(weight_XE.dtype) if need_bias else None


def product_backward(
    dy_TX: Tensor, x_TE: Tensor, weight_XE: Tensor, need_x: bool = True, need_weight: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and the weight, in their dtypes."""
    dx_TE = (dy_TX @ weight_XE.float()).to(x_TE.dtype) if need_x else None
    dweight_XE = (dy_TX.t() @ x_TE.float()).to(weight_XE.dtype) if need_weight else None
    return dx_TE, dweight_XE
