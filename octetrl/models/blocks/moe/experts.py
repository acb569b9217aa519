"""All experts of a layer as one node, for the fused forms of rollout and training: the module's products, with less
memory traffic between them.

    x8 = quantise(x)                      once for each token, not for each of its experts' rows
    h  = x8[token] W_gate_up^T            the rows are gathered as codes
    y  = SiLU(gate) * up, quantised       in one kernel: y never exists in BF16; or another `Activation`
    o  = y W_down^T                       the products add the experts' biases, if they have any

Quantising works on blocks of one row, so a gathered row of codes has the bits of quantising the gathered row. Values
and gradients are those of the separate ops (rows.py, layers/stacked.py).

Backward: dgrad in FP8, like the forward, with the codes that are made once an update; wgrad in the model's dtype. It
gathers x again and computes y again, so the forward saves x of the tokens and h: E values a token and 2 F a row, where
the separate ops save E + 3 F values a row. No launch reads the host, and nothing loops over experts on a GPU.

Legend: T tokens, P = T S rows sorted by expert, E hidden size, F an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.backends import FUSED
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.grouped_bf16_gemm import grouped_bf16_gemm, grouped_bias_gradient, grouped_wgrad
from octetrl.kernels.gemm.grouped_fp8_gemm import grouped_fp8_gemm
from octetrl.kernels.profiler_parts import part
from octetrl.kernels.rows.clamped_glu import clamped_glu, clamped_glu_backward, clamped_glu_quantize
from octetrl.kernels.rows.combine_experts import combine_experts
from octetrl.kernels.rows.gather_codes import gather_codes
from octetrl.kernels.rows.silu_mul import silu_mul, silu_mul_backward
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize
from octetrl.layers.linear import ACTIVATION_QUANTIZERS, Projection
from octetrl.layers.stacked import Float8StackedLinear, RowGroups
from octetrl.models.blocks.products import Operand


class Activation(NamedTuple):
    """Between the two products: [P, 2F] -> [P, F]."""

    forward: Callable[[Tensor], Tensor]  # differentiable
    quantize: Callable[[Tensor, bool], Quantized]
    backward: Callable[[Tensor, Tensor], Tensor]


SILU = Activation(silu_mul, silu_mul_quantize, silu_mul_backward)
CLAMPED = Activation(clamped_glu, clamped_glu_quantize, clamped_glu_backward)


class ExpertValues(NamedTuple):
    down_PE: Tensor
    gate_up_P2F: Tensor  # no gradient


def can_fuse_experts(gate_up: Projection, down: Projection) -> bool:
    """An adapter reads the rows in the model's dtype, between the ops that are one here."""
    return gate_up.lora is None and down.lora is None


def run_experts(
    x_TE: Tensor,
    groups: RowGroups,
    gate_up: Projection,
    down: Projection,
    codes: Quantized | None = None,
    activation: Activation = SILU,
) -> ExpertValues:
    """The outputs of all rows, differentiable by x, weights and biases. `codes`: the rows quantised for `gate_up`, if
    known."""
    parameters = gate_up.weight, down.weight, gate_up.bias, down.bias
    return ExpertValues(*_Experts.apply(x_TE, *parameters, groups, gate_up, down, codes, activation))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        gate_up_weight: Tensor | None,
        down_weight: Tensor | None,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        groups: RowGroups,
        gate_up: Projection,
        down: Projection,
        codes: Quantized | None,
        activation: Activation,
    ) -> tuple[Tensor, Tensor]:
        with part("quantize"):
            x = _gathered(_operand(gate_up, x_TE), groups.token_P) if codes is None else codes
        with part("gemm_forward"):
            gate_up_P2F = _product(gate_up, x, groups)
        del x
        with part("rows"):
            y = _gated(down, gate_up_P2F, activation)
        with part("gemm_forward"):
            down_PE = _product(down, y, groups)
        # The weights are saved only so that autograd notices if they change between forward and backward.
        ctx.save_for_backward(x_TE, gate_up_P2F, gate_up_weight, down_weight)
        ctx.mark_non_differentiable(gate_up_P2F)
        ctx.groups, ctx.linears, ctx.activation = groups, (gate_up, down), activation
        return down_PE, gate_up_P2F

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, gate_up_P2F, gate_up_weight, down_weight = ctx.saved_tensors
        groups: RowGroups = ctx.groups
        gate_up, down = ctx.linears
        need_x, need_gate_up, need_down, *need_biases = ctx.needs_input_grad[:5]
        ddown_PE, first_X1 = grads[0].contiguous(), groups.first_X1
        dx_TE = dgate_up_weight = ddown_weight = dgate_up_bias = ddown_bias = None
        if need_down:
            with part("gemm_wgrad"):
                ddown_weight = grouped_wgrad(ddown_PE, ctx.activation.forward(gate_up_P2F), first_X1, down_weight.dtype)
        dy_PF = _dgrad(down, ddown_PE, groups)
        with part("rows"):
            dgate_up_P2F = ctx.activation.backward(gate_up_P2F, dy_PF)
        del dy_PF
        if any(need_biases):
            ddown_bias = grouped_bias_gradient(ddown_PE, first_X1, down.bias.dtype)
            dgate_up_bias = grouped_bias_gradient(dgate_up_P2F, first_X1, gate_up.bias.dtype)
        if need_gate_up:
            with part("gemm_wgrad"):
                x_PE = x_TE.index_select(0, groups.token_P)
                dgate_up_weight = grouped_wgrad(dgate_up_P2F, x_PE, first_X1, gate_up_weight.dtype)
        if need_x:
            dx_PE = _dgrad(gate_up, dgate_up_P2F, groups)
            with part("rows"):
                once_TS = torch.ones(groups.row_TS.shape, device=x_TE.device)
                dx_TE = combine_experts(dx_PE, once_TS, groups.row_TS.contiguous(), None)
        return dx_TE, dgate_up_weight, ddown_weight, dgate_up_bias, ddown_bias, None, None, None, None, None


def _operand(linear: Projection, x: Tensor) -> Operand:
    if isinstance(linear, Float8StackedLinear):
        return ACTIVATION_QUANTIZERS[linear.backend](x, linear.power_of_two)
    return x


def _gathered(x: Operand, token_P: Tensor) -> Operand:
    if isinstance(x, Tensor):
        return x.index_select(0, token_P)
    return gather_codes(x, token_P)


def _gated(down: Projection, gate_up_P2F: Tensor, activation: Activation) -> Operand:
    if isinstance(down, Float8StackedLinear) and down.backend in FUSED:
        return activation.quantize(gate_up_P2F, down.power_of_two)
    return _operand(down, activation.forward(gate_up_P2F))


def _product(linear: Projection, x: Operand, groups: RowGroups) -> Tensor:
    if isinstance(linear, Float8StackedLinear):
        linear.check_codes()
        assert isinstance(x, Quantized)
        operand, own = linear.forward_operand(), groups.owner_O3
        how: dict[str, Any] = {"owner_O3": own, "bias": linear.bias, "backend": linear.backend}
        return grouped_fp8_gemm(x, operand, groups.first_X1, **how)
    assert isinstance(x, Tensor) and linear.weight is not None
    return grouped_bf16_gemm(x, linear.weight.detach(), groups.first_X1, bias=linear.bias)


def _dgrad(linear: Projection, dy_PN: Tensor, groups: RowGroups) -> Tensor:
    if isinstance(linear, Float8StackedLinear):
        with part("quantize"):
            dy = ACTIVATION_QUANTIZERS[linear.backend](dy_PN, linear.power_of_two)
        with part("gemm_dgrad"):
            weights = linear.dgrad_operand()
            own = groups.owner_O3
            return grouped_fp8_gemm(dy, weights, groups.first_X1, turned=True, owner_O3=own, backend=linear.backend)
    assert linear.weight is not None
    with part("gemm_dgrad"):
        return grouped_bf16_gemm(dy_PN, linear.weight.detach(), groups.first_X1, turned=True)
