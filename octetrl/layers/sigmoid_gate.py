"""x * sigmoid(gate), element by element in float32 with one rounding. A row's bits do not depend on other rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Float32. On a CPU it is that of float64, because torch computes the elements at a tensor's end by another formula
    than the rest."""
    return x.float().sigmoid() if x.is_cuda else x.double().sigmoid().float()


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) in x's dtype, contiguous. Differentiable. The two have one shape."""
    gated: Tensor = _SigmoidGate.apply(x, gate)
    return gated


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return (x.float() * sigmoid(gate)).to(x.dtype).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return sigmoid_gate_backward(grads[0], *ctx.saved_tensors)


def sigmoid_gate_backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and gate, in their dtypes."""
    share, dy = sigmoid(gate), dy.float()
    return (dy * share).to(x.dtype), (dy * x.float() * share * (1.0 - share)).to(gate.dtype)
