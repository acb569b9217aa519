"""The gated MLP's fused form for rollout on a GPU: one kernel computes SiLU * up and quantises it.

T tokens, E hidden size, F intermediate size.
"""

from __future__ import annotations

from torch import Tensor

from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.blocks.mlp.module import MLP
from octetrl.models.blocks.products import Operand, project, wants_codes


def rollout(mlp: MLP, x: Operand, inputs: RolloutInputs) -> Tensor:
    quantize, power_of_two = wants_codes(mlp.down_proj)
    gate_up_T2F = project(mlp.gate_up_proj, x)
    y = silu_mul_quantize(gate_up_T2F, power_of_two) if quantize else silu_mul(gate_up_T2F)
    down_TE = project(mlp.down_proj, y)
    if mlp.probe is not None:
        mlp.probe(mlp.layer, "gate_up_proj", gate_up_T2F)
        mlp.probe(mlp.layer, "SiLU", y)
        mlp.probe(mlp.layer, "down_proj", down_TE)
    return down_TE
