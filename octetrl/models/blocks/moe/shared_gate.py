"""The gate of a shared expert, as Qwen2-MoE has it: a number of each token that multiplies the expert's output.

    out = round(sigmoid(x . w) * shared(x))        product and sigmoid in float32, one rounding

The product adds along K in one order at any number of tokens, like the router's (docs/fp8.md §11). Everything after it
is done element by element, so a token's bits do not depend on the other tokens. On a CPU the sigmoid is that of
float64, because torch computes the elements at a tensor's end by another formula than the rest.

T tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight


class SharedGate(nn.Module):
    """Its weight [1, E] is in the model's dtype and never FP8."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        weight = torch.empty(1, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight.normal_(std=hidden_size**-0.5))

    def forward(self, x_TE: Tensor, shared_TE: Tensor) -> Tensor:
        """The gated output [T, E], in the dtype of `shared_TE`. Differentiable."""
        gated_TE: Tensor = _SharedGate.apply(x_TE, shared_TE, self.weight)
        return gated_TE


class _SharedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, shared_TE: Tensor, weight_1E: Tensor) -> Tensor:
        gate_T1 = _sigmoid(bf16_gemm_straight(x_TE.contiguous(), weight_1E, torch.float32))
        ctx.save_for_backward(x_TE, shared_TE, weight_1E, gate_T1)
        return (shared_TE.float() * gate_T1).to(shared_TE.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, shared_TE, weight_1E, gate_T1 = ctx.saved_tensors
        need_x, need_shared, need_weight = ctx.needs_input_grad
        dgated_TE = grads[0].float()
        dlogit_T1 = (dgated_TE * shared_TE.float()).sum(1, keepdim=True) * gate_T1 * (1.0 - gate_T1)
        return (
            (dlogit_T1 * weight_1E.float()).to(x_TE.dtype) if need_x else None,
            (dgated_TE * gate_T1).to(shared_TE.dtype) if need_shared else None,
            (dlogit_T1.t() @ x_TE.float()).to(weight_1E.dtype) if need_weight else None,
        )


def _sigmoid(logit_T1: Tensor) -> Tensor:
    return logit_T1.sigmoid() if logit_T1.is_cuda else logit_T1.double().sigmoid().float()
