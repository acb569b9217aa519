"""Mixture of experts: each token passes through some of many small gated MLPs, and through a shared one if any.

    logits = x Wgate^T                                        float32 (routing.py: experts and weights)
    y_e    = down_e(SiLU(gate_e(x)) * up_e(x))                for each chosen expert, rounded to the model's dtype
    out    = round(sum over the token's experts, ascending, of weight_e y_e, + shared(x))        float32, one rounding
    shared(x) may have a gate (shared_gate.py)

Both sides and all batches use one code path. Trainer and engine therefore choose the same experts, and no choice is
replayed (docs/fp8.md §11). The experts are stacked linears (layers/stacked.py). The shared expert is an ordinary MLP.

T tokens, S experts a token, P = T S rows sorted by expert, E hidden size, F an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.rows.route_tokens import Routed
from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.layers.context import Context, PackedContext
from octetrl.layers.linear import Projection
from octetrl.layers.rotary import Rotary
from octetrl.layers.router_record import RouterRecord
from octetrl.layers.stacked import RowGroups, group_codes, group_rows
from octetrl.models.blocks.block import Block, BlockBuilder
from octetrl.models.blocks.mlp.module import MLP
from octetrl.models.blocks.moe.experts import can_fuse_experts, run_experts
from octetrl.models.blocks.moe.layout import MixtureLayout
from octetrl.models.blocks.moe.routing import Router
from octetrl.models.blocks.moe.rows import combine, gather
from octetrl.models.blocks.moe.shared_gate import SharedGate
from octetrl.models.blocks.products import wants_codes


class Experts(nn.Module):
    """gate_up_proj: E -> 2F (gate first), down_proj: F -> E, of every expert; each stacked, BF16 or FP8."""

    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__()
        self.gate_up_proj = builder.linear("experts.gate_up_proj")
        self.down_proj = builder.linear("experts.down_proj")


class Summands(NamedTuple):
    """What a token's output is the sum of, and how it came about, for the probe."""

    logits_TX: Tensor
    routes: Routed
    groups: RowGroups
    gate_up_P2F: Tensor
    down_PE: Tensor
    shared_TE: Tensor | None  # behind its gate


class MixtureOfExperts(Block):
    def __init__(
        self, builder: BlockBuilder, layout: MixtureLayout, make_shared: Callable[[BlockBuilder], MLP]
    ) -> None:
        super().__init__(builder)
        self.num_experts = layout.routing.num_experts
        self.gate = Router(layout.routing, builder.spec.hidden_size, dtype=builder.dtype, device=builder.device)
        self.experts = Experts(builder)
        self.shared_experts: MLP | None = None
        if layout.shared_size:
            self.shared_experts = make_shared(replace(builder, linear=partial(_shared_linear, builder)))
        self.shared_expert_gate: SharedGate | None = None
        if layout.shared_size and layout.shared_gate:
            self.shared_expert_gate = SharedGate(builder.spec.hidden_size, dtype=builder.dtype, device=builder.device)

    @property
    def reader(self) -> Projection | None:
        return None

    @property
    def codes_reader(self) -> Projection | None:
        gate_up, shared = self.experts.gate_up_proj, self.shared_experts
        if wants_codes(gate_up)[0] and can_fuse_experts(gate_up, self.experts.down_proj):
            return gate_up
        return None if shared is None else shared.gate_up_proj

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        shared_TE = None if self.shared_experts is None else self.shared_experts(x_TE, rotary, context)
        return self.mix(x_TE, shared_TE, context.routers if isinstance(context, PackedContext) else None)

    def mix(
        self, x_TE: Tensor, shared_TE: Tensor | None, record: RouterRecord | None = None, *, fused: bool = False
    ) -> Tensor:
        """The experts' sum, with what the shared expert returned, before its gate."""
        return self.sum_of(self.summands(x_TE, shared_TE, record, fused=fused))

    def summands(
        self,
        x_TE: Tensor,
        shared_TE: Tensor | None,
        record: RouterRecord | None = None,
        *,
        fused: bool = False,
        codes: Quantized | None = None,
    ) -> Summands:
        """`record` gets the loads. `fused`: the experts as one node (experts.py), with the same bits. `codes`: x
        quantised for them, if known."""
        if self.shared_expert_gate is not None and shared_TE is not None:
            shared_TE = self.shared_expert_gate(x_TE, shared_TE)
        logits_TX = self.gate(x_TE)
        routes = self.gate.routes(logits_TX)
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        fused = fused and can_fuse_experts(gate_up, down)
        if fused and codes is not None:
            groups, codes = group_codes(routes.expert_TS, self.num_experts, codes)
        else:
            groups = group_rows(routes.expert_TS, self.num_experts)
        if record is not None:
            weight_TS = record.observe(self.layer, logits_TX, routes.score_TX, groups.load_X, routes.weight_TS)
            routes = routes._replace(weight_TS=weight_TS)
        if fused:
            down_PE, gate_up_P2F = run_experts(x_TE, groups, gate_up, down, codes)
        else:
            gate_up_P2F = gate_up(gather(x_TE, groups), groups)
            down_PE = down(silu_mul(gate_up_P2F), groups)
        return Summands(logits_TX, routes, groups, gate_up_P2F, down_PE, shared_TE)

    def sum_of(self, mixed: Summands) -> Tensor:
        sum_TE = combine(mixed.down_PE, mixed.routes.weight_TS, mixed.shared_TE, mixed.groups)
        if self.probe is not None:
            self._probe_all(mixed, sum_TE)
        return sum_TE

    def _probe_all(self, mixed: Summands, sum_TE: Tensor) -> None:
        """Passes all values to the probe. A token's row at an expert's site holds all its experts, in order of id."""
        assert self.probe is not None
        self.probe(self.layer, "router logits", mixed.logits_TX)
        self.probe(self.layer, "chosen experts", mixed.routes.expert_TS)
        self.probe(self.layer, "routing weights", mixed.routes.weight_TS)
        of_experts = mixed.gate_up_P2F, silu_mul(mixed.gate_up_P2F.detach()), mixed.down_PE
        for op, value_PN in zip(("gate_up_proj", "SiLU", "down_proj"), of_experts, strict=True):
            self.probe(self.layer, f"experts' {op}", value_PN[mixed.groups.row_TS])
        self.probe(self.layer, "sum of experts", sum_TE)
        if self.shared_expert_gate is not None and mixed.shared_TE is not None:
            self.probe(self.layer, "gated shared expert", mixed.shared_TE)


def _shared_linear(builder: BlockBuilder, name: str) -> Projection:
    return builder.linear(f"shared_experts.{name}")
