"""The gated MLP: down(SiLU(gate(x)) * up(x)), with gate and up as one GEMM."""

from __future__ import annotations

from torch import Tensor, nn

from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.layers.linear import Projection


class MLP(nn.Module):
    """gate_up_proj: E -> 2F (gate first), down_proj: F -> E; each a Linear or a Float8Linear."""

    def __init__(self, gate_up_proj: Projection, down_proj: Projection) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, x_TE: Tensor) -> Tensor:
        down_TE: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x_TE)))
        return down_TE
