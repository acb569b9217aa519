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
from torch import Tensor
from torch.nn.functional import silu


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
        return gated_rms_norm_reference(o_THV, z_THV, weight_V, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*gated_rms_norm_backward(gradients[0], *ctx.saved_tensors, ctx.eps), None)


def gated_rms_norm_backward(
    dy_THV: Tensor, o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """do and dz [T, H, V], contiguous, and dweight [V], each in the dtype of what it is the gradient of."""
    return gated_rms_norm_backward_reference(dy_THV, o_THV, z_THV, weight_V, eps)


def gated_rms_norm(o_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """y [T, H, V], contiguous. Differentiable in o, z and weight, which have one dtype; last axes contiguous."""
    assert o_THV.shape == z_THV.shape and o_THV.shape[-1:] == weight_V.shape, f"gated_rms_norm: {o_THV.shape}"
    assert o_THV.dtype == z_THV.dtype == weight_V.dtype, f"gated_rms_norm: {o_THV.dtype}, {z_THV.dtype}"
    y_THV: Tensor = _GatedRMSNorm.apply(o_THV, z_THV, weight_V, eps)
    return y_THV
