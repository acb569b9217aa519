"""Linears of several experts in one parameter: each row of x is multiplied by its expert's matrix.

    y[p] = x[p] W_e^T (+ b_e),    e the expert of row p;    W [X N, K], the experts' stacked matrices; b [X N]

Rows are sorted by expert (`RowGroups`), and one launch computes all experts (kernels/gemm/grouped_*.py). A row's bits
follow from the row and its expert's matrix alone. Neither an expert's number of rows nor any other expert changes them.

In FP8 each matrix has 128 x 128 blocks of its own, which start again at every expert; x has 1 x 128, as has the
gradient for dgrad. The gradient of the weights (wgrad) is not FP8: its blocks of 128 tokens would have to be padded for
every expert, and the fastest FP8 kernels known for it gain little.

Legend: T tokens, S experts a token, P = T S rows, X experts, N out_features, K in_features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.backends import FUSED, BackendName
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.grouped_bf16_gemm import grouped_bf16_gemm, grouped_bias_gradient, grouped_wgrad
from octetrl.kernels.gemm.grouped_fp8_gemm import ALIGNED, grouped_fp8_gemm
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.kernels.quantize.transpose_codes import transpose_codes
from octetrl.kernels.rows.sort_and_gather import sort_and_gather
from octetrl.kernels.rows.sort_by_expert import sort_by_expert
from octetrl.layers.linear import ACTIVATION_QUANTIZERS, Float8Linear
from octetrl.layers.lora import LoraAdapter
from octetrl.layers.stacked_lora import StackedLoraAdapter
from octetrl.layers.unquantized_linear import Linear


class RowGroups(NamedTuple):
    """The rows of all experts: a token has a row for each of its experts, sorted by expert, then by token."""

    token_P: Tensor  # int64: the token of each row
    row_TS: Tensor  # int64: a token's rows, in the order of its experts
    first_X1: Tensor  # int32: rows of expert e are first[e] to first[e + 1]
    owner_O3: Tensor  # int32: the rows of each tile, see sort_by_expert.py

    @property
    def load_X(self) -> Tensor:
        """Rows of each expert."""
        return self.first_X1.diff()


def group_rows(expert_TS: Tensor, num_experts: int) -> RowGroups:
    """Sorts the rows of all tokens by expert. expert_TS: int64, each token's experts. Reads nothing to the host."""
    return RowGroups(*sort_by_expert(expert_TS, num_experts))


def group_codes(expert_TS: Tensor, num_experts: int, x: Quantized) -> tuple[RowGroups, Quantized]:
    """`group_rows`, with the rows of x's codes."""
    found, codes = sort_and_gather(expert_TS, num_experts, x)
    return RowGroups(*found), codes


class StackedLinear(Linear):
    """y [P, N] of x [P, K] in `dtype`; weight [X N, K], bias [X N] or None."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        count: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, count * out_features, bias, dtype=dtype, device=device)
        self.out_features, self.count = out_features, count

    def forward(self, x: Tensor, groups: RowGroups | None = None) -> Tensor:
        assert groups is not None, "experts need to know which rows are theirs"
        y_PN: Tensor = _StackedFunction.apply(x, self.weight, self.bias, groups.first_X1)
        return _with_branch(self.lora, y_PN, x, groups)


class Float8StackedLinear(Float8Linear):
    """`StackedLinear` with FP8 operands. `codes` [X N, K], `scale` [X ceil(N/128), ceil(K/128)]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        count: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: BackendName = "emulated",
        power_of_two: bool = False,
        square_wgrad: bool = False,
        has_weight: bool = True,
    ) -> None:
        super().__init__(
            in_features,
            count * out_features,
            bias,
            dtype=dtype,
            device=device,
            backend=backend,
            power_of_two=power_of_two,
            square_wgrad=square_wgrad,
            has_weight=has_weight,
        )
        is_aligned = in_features % ALIGNED == out_features % ALIGNED == 0
        assert is_aligned or backend not in FUSED, f"{out_features} x {in_features}: build_blocks.py refuses them"
        self.out_features, self.count = out_features, count
        self.blocks = -(-out_features // self.block[0])  # of an expert's rows
        self.scale = torch.full((count * self.blocks, self.scale.shape[1]), torch.nan, device=device)

    @property
    def rows_per_unit(self) -> int:
        """Rows that can be quantised without the others: they have scales of their own."""
        height = self.block[0]
        return height if self.out_features % height == 0 else self.out_features

    def scale_row(self, row: int) -> int:
        """The row of `scale` at which `row` begins. `row`: a multiple of `rows_per_unit`."""
        expert, rest = divmod(row, self.out_features)
        return expert * self.blocks + -(-rest // self.block[0])

    def forward(self, x: Tensor, groups: RowGroups | None = None) -> Tensor:
        assert groups is not None, "a stacked linear needs the rows of each expert"
        self.check_codes()
        y_PN: Tensor = _Float8StackedFunction.apply(x, self.weight, self.bias, groups.first_X1, self)
        return _with_branch(self.lora, y_PN, x, groups)

    def quantize(
        self,
        weight_NK: Tensor,
        *,
        name: str = "weight",
        out: Quantized | None = None,
        transposed_KN: Tensor | None = None,
        check: bool = False,
    ) -> Quantized:
        if self.out_features % self.block[0] == 0:  # every expert starts at the border of a block
            return super().quantize(weight_NK, name=name, out=out, transposed_KN=transposed_KN, check=check)
        if out is None:
            out = Quantized(torch.empty_like(self.codes), torch.empty_like(self.scale))
        for expert in range(weight_NK.shape[0] // self.out_features):  # all of them, or those of one worker
            rows = slice(expert * self.out_features, (expert + 1) * self.out_features)
            quantize_weight(weight_NK[rows], self.power_of_two, name=name, out=self.of_expert(out, expert), check=check)
        if transposed_KN is not None:
            transpose_codes(out.codes, transposed_KN)
        return out

    def dgrad_operand(self) -> Quantized:
        """Freed codes are quantised again expert by expert, if a block would contain rows of two."""
        if self.has_codes or self.backend not in FUSED or self.out_features % self.block[0] == 0:
            return super().dgrad_operand()
        made = self.forward_operand()
        return Quantized(transpose_codes(made.codes), made.scale.t())

    def columns_of(self, weight_NK: Tensor) -> Quantized:
        """Each expert's blocks start at its first row."""
        parts = [super(Float8StackedLinear, self).columns_of(one) for one in weight_NK.split(self.out_features)]
        return Quantized(torch.cat([one.codes for one in parts], 1), torch.cat([one.scale for one in parts], 1))

    def of_expert(self, operand: Quantized, expert: int) -> Quantized:
        """One expert's part of codes and scales: views."""
        n, blocks = self.out_features, self.blocks
        return Quantized(
            operand.codes[expert * n : (expert + 1) * n], operand.scale[expert * blocks : (expert + 1) * blocks]
        )


def _with_branch(adapter: LoraAdapter | None, y_PN: Tensor, x_PK: Tensor, groups: RowGroups) -> Tensor:
    assert adapter is None or isinstance(adapter, StackedLoraAdapter)
    return y_PN if adapter is None else adapter.of_rows(y_PN, x_PK, groups.first_X1)


class _StackedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, first_X1: Tensor) -> Tensor:
        ctx.save_for_backward(x_PK, weight_NK, first_X1)
        return grouped_bf16_gemm(x_PK, weight_NK, first_X1, bias=bias_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_PK, weight_NK, first_X1 = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dy_PN = grads[0].contiguous()
        dx_PK = grouped_bf16_gemm(dy_PN, weight_NK, first_X1, turned=True) if need_x else None
        dweight_NK = grouped_wgrad(dy_PN, x_PK, first_X1, weight_NK.dtype) if need_weight else None
        dbias_N = grouped_bias_gradient(dy_PN, first_X1, weight_NK.dtype) if need_bias else None
        return dx_PK, dweight_NK, dbias_N, None


class _Float8StackedFunction(torch.autograd.Function):
    """Forward and dgrad in FP8, wgrad in the model's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x_PK: Tensor,
        weight_NK: Tensor | None,
        bias_N: Tensor | None,
        first_X1: Tensor,
        linear: Float8StackedLinear,
    ) -> Tensor:
        # The weight is saved only so that autograd notices if it changes between forward and backward.
        ctx.save_for_backward(x_PK, weight_NK, first_X1)
        ctx.linear = linear
        x8 = ACTIVATION_QUANTIZERS[linear.backend](x_PK, linear.power_of_two)
        return grouped_fp8_gemm(x8, linear.forward_operand(), first_X1, bias=bias_N, backend=linear.backend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_PK, weight_NK, first_X1 = ctx.saved_tensors
        linear: Float8StackedLinear = ctx.linear
        need_x, need_weight, need_bias, _, _ = ctx.needs_input_grad
        dx_PK = dweight_NK = dbias_N = None
        dy_PN = grads[0].contiguous()
        if need_x:
            dy8 = ACTIVATION_QUANTIZERS[linear.backend](dy_PN, linear.power_of_two)
            dx_PK = grouped_fp8_gemm(dy8, linear.dgrad_operand(), first_X1, turned=True, backend=linear.backend)
        if need_weight:
            dweight_NK = grouped_wgrad(dy_PN, x_PK, first_X1, weight_NK.dtype)
        if need_bias:
            dbias_N = grouped_bias_gradient(dy_PN, first_X1, x_PK.dtype)
        return dx_PK, dweight_NK, dbias_N, None, None
