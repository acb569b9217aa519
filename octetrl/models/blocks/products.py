"""Norms, products of linears and their operands, for the fused forms of all blocks.

A linear is BF16 or FP8, with or without an adapter (layers/linear.py, layers/lora.py). Its operands are:

                          forward, dgrad        wgrad
    BF16                  the tensor            the tensor
    FP8                   codes along rows      codes along tokens
    FP8 with an adapter   codes along rows      none (frozen weight); the adapter reads the tensor

T tokens, E hidden size, C channels of an input, N out_features, K in_features.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octetrl.fp8.backends import fp8_gemm_dgrad, fp8_gemm_wgrad
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm
from octetrl.kernels.gemm.fp8_gemm import fp8_gemm
from octetrl.kernels.profiler_parts import part
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_both import quantize_both
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.rows.add_rms_norm import add_rms_norm
from octetrl.layers.cut_linear import CutLinear, joined_operand, joined_result
from octetrl.layers.linear import Float8Linear, Projection
from octetrl.layers.lora import add_branch, lora_dgrad, lora_down, lora_dt, lora_wgrad
from octetrl.layers.norm import RMSNorm

Operand = Tensor | Quantized


class Input(NamedTuple):
    """Operands of a linear: `rows` in the forward or dgrad, `tokens` in wgrad. The same tensor if BF16."""

    rows: Operand
    tokens: Operand | None

    @property
    def for_backward(self) -> Operand:
        """The part of a forward's input that is saved."""
        return self.rows if self.tokens is None else self.tokens


def wants_codes(linear: Projection | None) -> tuple[bool, bool]:
    """Whether its input is quantised before, and whether with power-of-two scales. An adapter reads BF16."""
    quantize = isinstance(linear, Float8Linear) and linear.lora is None
    return quantize, isinstance(linear, Float8Linear) and linear.power_of_two


def base_product(linear: Projection, x: Operand, *, early: bool = False) -> Tensor:
    """y [T, N] without the adapter. An FP8 linear quantises a tensor. `early`: that of `fp8_gemm`."""
    if isinstance(linear, Float8Linear):
        linear.check_codes()
        codes = x if isinstance(x, Quantized) else quantize_activation(x, linear.power_of_two)
        y_TN = fp8_gemm(codes, linear.forward_operand(), early=early and linear.has_codes)
    else:
        assert isinstance(x, Tensor)
        y_TN = bf16_gemm(x, linear.weight, early=early, is_part=isinstance(linear, CutLinear))
    return y_TN if linear.bias is None else y_TN + linear.bias


# ---------------------------------------------------------------- rollout


def project(linear: Projection, x: Operand) -> Tensor:
    """y [T, N], no gradient. Weights are written between forwards only, so no kernel in front writes them."""
    x = joined_operand(linear, x)
    y_TN = base_product(linear, x, early=True)
    if linear.lora is not None:
        assert isinstance(x, Tensor)
        add_branch(linear.lora, y_TN, lora_down(linear.lora, x))
    return joined_result(linear, y_TN)


# ---------------------------------------------------------------- training


def normed(
    x_TE: Tensor, norm: RMSNorm, reader: Projection | None, for_wgrad: bool, add_TE: Tensor | None = None
) -> Input:
    """The norm of x + add, as `reader`'s operand. The sum replaces x."""
    quantize, power_of_two = wants_codes(reader)
    if not quantize or for_wgrad:
        with part("rows"):
            _, n_TE = add_rms_norm(add_TE, x_TE, norm.multiplier, norm.eps, quantize=False)
        with part("quantize"):
            return Input(n_TE, n_TE) if reader is None else input_of(reader, n_TE, for_wgrad=for_wgrad)
    with part("rows"):
        _, n = add_rms_norm(add_TE, x_TE, norm.multiplier, norm.eps, quantize=True, power_of_two=power_of_two)
    return Input(n, None)


def input_of(linear: Projection, x_TC: Tensor, *, for_wgrad: bool, is_gradient: bool = False) -> Input:
    """The operands of `linear`'s GEMMs for a BF16 tensor [T, C]."""
    if not isinstance(linear, Float8Linear):
        return Input(x_TC, x_TC)
    if linear.lora is not None:  # the weight is frozen, the adapter reads BF16
        return Input(quantize_activation(x_TC, linear.power_of_two), x_TC)
    if not for_wgrad:
        return Input(quantize_activation(x_TC, linear.power_of_two), None)
    square = linear.square_wgrad and not is_gradient
    return Input(*quantize_both(x_TC, linear.power_of_two, square=square))


def gradient_of(linear: Projection, dy_TN: Tensor) -> Input:
    """The operands of dgrad and wgrad for the gradient of `linear`'s product."""
    return input_of(linear, dy_TN, for_wgrad=True, is_gradient=True)


def wgrad_input(linear: Projection, x_TC: Tensor) -> Operand:
    """The operand of wgrad for `linear`'s BF16 input [T, C]."""
    if not isinstance(linear, Float8Linear) or linear.lora is not None:
        return x_TC
    return quantize_tokens(x_TC, linear.power_of_two, linear.square_wgrad)


def product(linear: Projection, x: Input) -> Tensor:
    with part("gemm_forward"):
        y_TN = base_product(linear, x.rows)
        if linear.lora is not None:
            assert isinstance(x.tokens, Tensor)
            add_branch(linear.lora, y_TN, lora_down(linear.lora, x.tokens))
        return y_TN


def dgrad(linear: Projection, dy: Input) -> Tensor:
    """dx [T, K]."""
    with part("gemm_dgrad"):
        if isinstance(linear, Float8Linear):
            assert isinstance(dy.rows, Quantized)
            dx_TK = fp8_gemm_dgrad(dy.rows, linear.dgrad_operand(), linear.backend)
        else:
            assert isinstance(dy.rows, Tensor)
            dx_TK = dy.rows @ linear.weight
        if linear.lora is not None:
            assert isinstance(dy.tokens, Tensor)
            dx_TK.add_(lora_dgrad(linear.lora, lora_dt(linear.lora, dy.tokens), dx_TK.dtype))
        return dx_TK


def wgrad(gradients: dict[str, Tensor | None], name: str, linear: Projection, dy: Input, x: Operand) -> None:
    """Adds the gradients of the trained parameters of linear `name`: its weight, an adapter's A and B, or none."""
    with part("gemm_wgrad"):
        if linear.lora is not None:
            assert isinstance(dy.tokens, Tensor) and isinstance(x, Tensor)
            t_TPR, dt_TPR = lora_down(linear.lora, x), lora_dt(linear.lora, dy.tokens)
            of_branch = lora_wgrad(linear.lora, dy.tokens, x, t_TPR, dt_TPR)
            gradients[f"{name}.lora.a"], gradients[f"{name}.lora.b"] = of_branch
        elif linear.weight is None or not linear.weight.requires_grad:
            return
        elif isinstance(linear, Float8Linear):
            assert isinstance(dy.tokens, Quantized) and isinstance(x, Quantized)
            gradients[f"{name}.weight"] = fp8_gemm_wgrad(dy.tokens, x, linear.backend, linear.weight.dtype)
        else:
            assert isinstance(dy.tokens, Tensor) and isinstance(x, Tensor)
            gradients[f"{name}.weight"] = dy.tokens.t() @ x
