"""`Linear`: a linear in the model's dtype, BF16 or float32.

On a CPU it accumulates in float64, rounds to float32, adds the bias in float32 and rounds to the output dtype. A row's
bits therefore do not depend on the batch, the threads or the padding. On CUDA cuBLAS rounds to BF16, and the bias is
then added in BF16. The backward runs in float32 and makes no such promise.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octetrl.fp8.quantize import row_chunks
from octetrl.layers.lora import LoraAdapter


class Linear(nn.Module):
    """y = x W^T + b in `dtype`. weight [N, K], bias [N] or None; x [..., K].

    On a GPU this module multiplies by cuBLAS, whose order of summation may depend on M if M is small. The fused
    forwards use `bf16_gemm`, which has one order for every M. At small M their bits may therefore differ from this
    module's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(initial_weight(out_features, in_features, dtype, device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.lora: LoraAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, self.in_features)
        if x.device.type != "cpu":
            y_MN = F.linear(x_MK, self.weight)
            y_MN = y_MN if self.bias is None else y_MN + self.bias
        else:
            y_MN = _LinearFunction.apply(x_MK, self.weight, self.bias)
        y_MN = y_MN if self.lora is None else self.lora(y_MN, x_MK)
        return y_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, {self.weight.dtype}"


class _LinearFunction(torch.autograd.Function):
    """CPU only. The forward accumulates in float64, rounds to float32, adds the bias and rounds. The backward runs in
    float32."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return exact_product(x_MK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dy_MN = dy_MN.float()
        dx_MK = (dy_MN @ weight_NK.float()).to(x_MK.dtype) if need_x else None
        dweight_NK = (dy_MN.t() @ x_MK.float()).to(weight_NK.dtype) if need_weight else None
        return dx_MK, dweight_NK, dy_MN.sum(0) if need_bias else None


def exact_product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """y [M, N] on a CPU, in x's dtype: float64 sums, rounded to float32; then the bias is added. No gradient."""
    weight_KN = weight_NK.double().t()
    y_MN = torch.empty(x_MK.shape[0], weight_NK.shape[0], dtype=x_MK.dtype)
    for rows in row_chunks(x_MK.shape[0], max(weight_NK.shape), 1):
        chunk_MN = (x_MK[rows].double() @ weight_KN).float()
        y_MN[rows] = chunk_MN if bias_N is None else chunk_MN.add_(bias_N)
    return y_MN


def initial_weight(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """Normal values with standard deviation 1/sqrt(in_features). A loaded checkpoint overwrites them."""
    weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
    if weight.is_meta:  # has no values; to draw them would import torch._dynamo, which takes a second
        return weight
    return weight.normal_(std=1.0 / math.sqrt(in_features))
