"""The gated MLP's fused form for training on a GPU: forward and backward.

    gate_up = n Wgu;  y = SiLU(gate) up;  out = y Wdown
    dy = dout Wdown^T;  dgate_up = silu_mul'(dy);  dWdown = dout^T y;  dn = dgate_up Wgu^T;  dWgu = dgate_up^T n

Saved: wgrad's operand of n, and gate_up. The backward computes y again from gate_up. If both linears are FP8, y and the
gradient of gate_up exist only as codes, computed in one read.

T tokens, E hidden size, F intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octetrl.kernels.profiler_parts import part
from octetrl.kernels.rows.silu_mul import silu_mul_backward_triton, silu_mul_triton
from octetrl.kernels.rows.silu_mul_backward_quantize import silu_mul_backward_quantize
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize
from octetrl.layers.linear import Float8Linear, Projection
from octetrl.models.blocks.block import TrainingInputs
from octetrl.models.blocks.mlp.module import MLP
from octetrl.models.blocks.products import (
    Input,
    Operand,
    dgrad,
    gradient_of,
    input_of,
    product,
    wgrad,
    wgrad_input,
)
from octetrl.models.blocks.saved import Gradients, Saved


@dataclass(slots=True)
class SavedMLP(Saved):
    n: Operand
    gate_up_T2F: Tensor


def begin(mlp: MLP, n: Input, inputs: TrainingInputs, *, costly: Any, observe: bool) -> SavedMLP:
    return SavedMLP(n=n.for_backward, gate_up_T2F=product(mlp.gate_up_proj, n))


def finish(mlp: MLP, saved: SavedMLP) -> Tensor:
    with part("rows"):
        y = _gated(mlp.down_proj, saved.gate_up_T2F)
    down_TE = product(mlp.down_proj, y)
    if mlp.probe is not None:
        mlp.probe(mlp.layer, "gate_up_proj", saved.gate_up_T2F)
        mlp.probe(mlp.layer, "SiLU", y.rows)
        mlp.probe(mlp.layer, "down_proj", down_TE)
    return down_TE


def backward(mlp: MLP, saved: SavedMLP, dout_TE: Tensor, gradients: Gradients) -> Tensor:
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    with part("quantize"):
        dout = gradient_of(down, dout_TE.contiguous())
    dy_TF = dgrad(down, dout)
    with part("rows"):
        dgate_up, y = _gated_backward(mlp, saved.gate_up_T2F, dy_TF)
    del dy_TF
    wgrad(gradients, "down_proj", down, dout, y)
    del y, dout
    dn_TE = dgrad(gate_up, dgate_up)
    wgrad(gradients, "gate_up_proj", gate_up, dgate_up, saved.n)
    return dn_TE


def _gated(down: Projection, gate_up_T2F: Tensor) -> Input:
    if isinstance(down, Float8Linear) and down.lora is None:
        return Input(silu_mul_quantize(gate_up_T2F, down.power_of_two), None)
    return input_of(down, silu_mul_triton(gate_up_T2F), for_wgrad=False)


def _gated_backward(mlp: MLP, gate_up_T2F: Tensor, dy_TF: Tensor) -> tuple[Input, Operand]:
    """The operands of gate_up's gradient, and y as the operand of the down projection's wgrad."""
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    adapted = gate_up.lora is not None or down.lora is not None
    if isinstance(gate_up, Float8Linear) and isinstance(down, Float8Linear) and not adapted:
        both, codes = silu_mul_backward_quantize(gate_up_T2F, dy_TF, down.power_of_two, square=down.square_wgrad)
        return Input(*both), codes
    y = wgrad_input(down, silu_mul_triton(gate_up_T2F))
    dgate_up_T2F = silu_mul_backward_triton(gate_up_T2F, dy_TF)
    return gradient_of(gate_up, dgate_up_T2F), y
