"""The gated MLP: down(SiLU(gate(x)) * up(x)), with gate and up as one GEMM."""

from __future__ import annotations

from torch import Tensor

from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.layers.context import Context
from octetrl.layers.linear import Projection
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.block import Block, BlockBuilder


class MLP(Block):
    """gate_up_proj: E -> 2F (gate first), down_proj: F -> E; each a Linear or a Float8Linear."""

    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__(builder)
        self.gate_up_proj = builder.linear("gate_up_proj")
        self.down_proj = builder.linear("down_proj")

    @property
    def reader(self) -> Projection:
        return self.gate_up_proj

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        gate_up_T2F = self.gate_up_proj(x_TE)
        y_TF = silu_mul(gate_up_T2F)
        down_TE: Tensor = self.down_proj(y_TF)
        if self.probe is not None:
            self.probe(self.layer, "gate_up_proj", gate_up_T2F)
            self.probe(self.layer, "SiLU", y_TF)
            self.probe(self.layer, "down_proj", down_TE)
        return down_TE
