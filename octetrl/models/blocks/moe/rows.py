"""Tokens to the rows of their experts, and the experts' outputs back to a token, with gradients.

    gather    x_P = x[token]            a copy; its backward adds a token's rows in the order of its experts
    combine   kernels/rows/combine_experts.py

Legend: T tokens, S experts a token, P = T S rows, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octetrl.kernels.rows.combine_experts import combine_experts
from octetrl.kernels.rows.combine_experts_backward import combine_experts_backward
from octetrl.layers.stacked import RowGroups


def gather(x_TE: Tensor, groups: RowGroups) -> Tensor:
    """x [P, E] of x [T, E], differentiable."""
    x_PE: Tensor = _Gather.apply(x_TE, groups)
    return x_PE


def combine(y_PE: Tensor, weight_TS: Tensor, shared_TE: Tensor | None, groups: RowGroups) -> Tensor:
    """The sum [T, E] of a token's experts, in y's dtype, differentiable. `shared`: the shared expert's output."""
    sum_TE: Tensor = _Combine.apply(y_PE, weight_TS, shared_TE, groups)
    return sum_TE


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, groups: RowGroups) -> Tensor:
        ctx.groups = groups
        return x_TE.index_select(0, groups.token_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns = ctx.groups.row_TS.t()
        dx_TE = grads[0][columns[0]].float()
        for row_T in columns[1:]:
            dx_TE += grads[0][row_T]
        return dx_TE.to(grads[0].dtype), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PE: Tensor, weight_TS: Tensor, shared_TE: Tensor | None, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(y_PE, weight_TS)
        ctx.groups = groups
        return combine_experts(y_PE, weight_TS.contiguous(), groups.row_TS, shared_TE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y_PE, weight_TS = ctx.saved_tensors
        row_TS = ctx.groups.row_TS.contiguous()
        dy_PE, dweight_TS = combine_experts_backward(grads[0].contiguous(), y_PE, weight_TS.contiguous(), row_TS)
        return dy_PE, dweight_TS, grads[0] if ctx.needs_input_grad[2] else None, None
