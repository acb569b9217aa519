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
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import softplus

from octetrl.kernels.instructions import sigmoid

BLOCK = 256  # of tokens and heads


@triton.jit(do_not_specialize=["num_tokens"])
def _decay_and_beta_kernel(
    a_ptr, b_ptr, log_rate_ptr, dt_bias_ptr, g_ptr, beta_ptr, num_tokens, stride_a, stride_b,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens * HEADS
    token, head = at // HEADS, at % HEADS
    a = tl.load(a_ptr + token * stride_a + head, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * stride_b + head, mask=inside, other=0.0).to(tl.float32)
    x = a + tl.load(dt_bias_ptr + head, mask=inside, other=0.0)
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e  # log(1 + e), also where e vanishes beside 1: e log(u) / (u - 1)
    log1p = tl.where(u == 1.0, e, tl.log(u) * tl.div_rn(e, tl.where(u == 1.0, 1.0, u - 1.0)))
    rate = tl.exp(tl.load(log_rate_ptr + head, mask=inside, other=0.0))
    tl.store(g_ptr + at, -rate * (tl.maximum(x, 0.0) + log1p), mask=inside)
    tl.store(beta_ptr + at, sigmoid(b, ON_GPU), mask=inside)


def decay_and_beta_triton(a_TH: Tensor, b_TH: Tensor, log_rate_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """The forward's launcher."""
    num_tokens, num_heads = a_TH.shape
    g_TH, beta_TH = (torch.empty(a_TH.shape, dtype=torch.float32, device=a_TH.device) for _ in range(2))
    if num_tokens:
        _decay_and_beta_kernel[(triton.cdiv(num_tokens * num_heads, BLOCK),)](
            a_TH, b_TH, log_rate_H, dt_bias_H, g_TH, beta_TH, num_tokens, a_TH.stride(0), b_TH.stride(0),
            HEADS=num_heads, BLOCK=BLOCK, ON_GPU=a_TH.is_cuda,
            **({"enable_fp_fusion": False} if a_TH.is_cuda else {}),
        )  # fmt: skip
    return g_TH, beta_TH


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
        return (decay_and_beta_triton if inputs[0].is_cuda else decay_and_beta_reference)(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return decay_and_beta_backward(*gradients, *ctx.saved_tensors)


def decay_and_beta(a_TH: Tensor, b_TH: Tensor, log_rate_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta, float32 [T, H]. Differentiable in all four.

    a, b: [T, H], float32 or BF16, last axis contiguous. log_rate_H (a checkpoint's `A_log`) and dt_bias_H: float32.
    """
    assert a_TH.shape == b_TH.shape and a_TH.stride(1) == b_TH.stride(1) == 1, f"decay_and_beta: {a_TH.shape}"
    assert log_rate_H.dtype == dt_bias_H.dtype == torch.float32, f"decay_and_beta: {log_rate_H.dtype}"
    g_TH, beta_TH = _DecayAndBeta.apply(a_TH, b_TH, log_rate_H, dt_bias_H)
    return g_TH, beta_TH
