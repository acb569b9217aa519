"""The decay and the writing strength of gated DeltaNet, from two small projections.

    g    = -exp(A_log) softplus(a + dt_bias)        float32, at most 0; a row's state decays by exp(g)
    beta = sigmoid(b)                               float32

Elementwise, so no order of sums matters in the forward. The CPU form computes in float64 and rounds once. The backward
is plain torch on every device; the gradients of A_log and dt_bias are sums over all tokens.

T tokens, H value heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus


def decay_and_beta_reference(
    a_TH: Tensor, b_TH: Tensor, log_rate_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """The forward in plain torch."""
    step_TH = softplus((a_TH.float() + dt_bias_H).double(), threshold=40.0)
    return (-log_rate_H.double().exp() * step_TH).float(), b_TH.double().sigmoid().float()


def decay_and_beta_backward(
    dg_TH: Tensor, dbeta_TH: Tensor, a_TH: Tensor, b_TH: Tensor, log_rate_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a and b, in their dtypes, and of A_log and dt_bias, float32."""
    shifted_TH, rate_H = a_TH.float() + dt_bias_H, -log_rate_H.exp()
    slope_TH = dg_TH * rate_H
    da_TH = slope_TH * shifted_TH.sigmoid()
    beta_TH = b_TH.float().sigmoid()
    db_TH = dbeta_TH * (beta_TH * (1.0 - beta_TH))
    dlog_rate_H = (slope_TH * softplus(shifted_TH)).sum(0)
    return da_TH.to(a_TH.dtype), db_TH.to(b_TH.dtype), dlog_rate_H, da_TH.sum(0)


class _DecayAndBeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return decay_and_beta_reference(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return decay_and_beta_backward(*gradients, *ctx.saved_tensors)


def decay_and_beta(a_TH: Tensor, b_TH: Tensor, log_rate_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta, float32 [T, H]. Differentiable in all four.

    a, b: [T, H], float32 or BF16, last axis contiguous. log_rate_H (a checkpoint's `A_log`) and dt_bias_H: float32.
    """
    assert a_TH.shape == b_TH.shape and log_rate_H.dtype == dt_bias_H.dtype == torch.float32, "decay_and_beta"
    g_TH, beta_TH = _DecayAndBeta.apply(a_TH, b_TH, log_rate_H, dt_bias_H)
    return g_TH, beta_TH
