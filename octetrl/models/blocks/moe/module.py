"""Mixture of experts: each token passes through some of many small gated MLPs, and through a shared one if any.

    logits = x Wgate^T                                        float32 (routing.py: experts and weights)
    y_e    = down_e(SiLU(gate_e(x)) * up_e(x))                for each chosen expert, rounded to the model's dtype
    out    = round(sum over the token's experts, ascending, of weight_e y_e, + shared(x))        float32, one rounding
    shared(x) may have a gate of one number a token, as Qwen2-MoE has it: round(sigmoid(x . w) * shared(x))

gpt-oss has biases of router and experts, and another activation (kernels/rows/clamped_glu.py).

Both sides and all batches use one code path. Trainer and engine therefore choose the same experts, and no choice is
replayed (docs/fp8.md §11). The experts are stacked linears (layers/stacked.py). The shared expert is an ordinary MLP.

**Rows.** Tokens go to the rows of their experts and the outputs back to a token, with gradients: gather is a copy,
whose backward adds a token's rows in the order of its experts; combine is kernels/rows/combine_experts.py.

**Gate of the shared expert.** Product and sigmoid are float32 with one rounding. The product adds along K in one order
at any number of tokens, like the router's. Everything after it is done element by element, so a token's bits do not
depend on the other tokens.

T tokens, S experts a token, P = T S rows sorted by expert, E hidden size, F an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight
from octetrl.kernels.rows.combine_experts import combine_experts
from octetrl.kernels.rows.combine_experts_backward import combine_experts_backward
from octetrl.kernels.rows.route_tokens import Routed
from octetrl.layers.context import Context, PackedContext, RouterRecord
from octetrl.layers.linear import Projection
from octetrl.layers.rotary import Rotary
from octetrl.layers.sigmoid_gate import sigmoid
from octetrl.layers.stacked import RowGroups, group_codes, group_rows
from octetrl.models.blocks.block import Block, BlockBuilder
from octetrl.models.blocks.mlp.module import MLP
from octetrl.models.blocks.moe.experts import CLAMPED, SILU, can_fuse_experts, run_experts
from octetrl.models.blocks.moe.layout import MixtureLayout
from octetrl.models.blocks.moe.routing import Router
from octetrl.models.blocks.products import wants_codes


class SharedGate(nn.Module):
    """Its weight [1, E] is in the model's dtype and never FP8."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        weight = torch.empty(1, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight.normal_(std=hidden_size**-0.5))

    def forward(self, x_TE: Tensor, shared_TE: Tensor) -> Tensor:
        """The gated output [T, E], in the dtype of `shared_TE`. Differentiable."""
        gated_TE: Tensor = _SharedGate.apply(x_TE, shared_TE, self.weight)
        return gated_TE


class _SharedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, shared_TE: Tensor, weight_1E: Tensor) -> Tensor:
        gate_T1 = sigmoid(bf16_gemm_straight(x_TE.contiguous(), weight_1E, torch.float32))
        ctx.save_for_backward(x_TE, shared_TE, weight_1E, gate_T1)
        return (shared_TE.float() * gate_T1).to(shared_TE.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, shared_TE, weight_1E, gate_T1 = ctx.saved_tensors
        need_x, need_shared, need_weight = ctx.needs_input_grad
        dgated_TE = grads[0].float()
        dlogit_T1 = (dgated_TE * shared_TE.float()).sum(1, keepdim=True) * gate_T1 * (1.0 - gate_T1)
        return (
            (dlogit_T1 * weight_1E.float()).to(x_TE.dtype) if need_x else None,
            (dgated_TE * gate_T1).to(shared_TE.dtype) if need_shared else None,
            (dlogit_T1.t() @ x_TE.float()).to(weight_1E.dtype) if need_weight else None,
        )


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
        self.activation = CLAMPED if layout.clamped else SILU
        size = builder.spec.hidden_size
        self.gate = Router(layout.routing, size, layout.has_biases, dtype=builder.dtype, device=builder.device)
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
            down_PE, gate_up_P2F = run_experts(x_TE, groups, gate_up, down, codes, self.activation)
        else:
            gate_up_P2F = gate_up(gather(x_TE, groups), groups)
            down_PE = down(self.activation.forward(gate_up_P2F), groups)
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
        of_experts = mixed.gate_up_P2F, self.activation.forward(mixed.gate_up_P2F.detach()), mixed.down_PE
        for op, value_PN in zip(("gate_up_proj", "SiLU", "down_proj"), of_experts, strict=True):
            self.probe(self.layer, f"experts' {op}", value_PN[mixed.groups.row_TS])
        self.probe(self.layer, "sum of experts", sum_TE)
        if self.shared_expert_gate is not None and mixed.shared_TE is not None:
            self.probe(self.layer, "gated shared expert", mixed.shared_TE)


def _shared_linear(builder: BlockBuilder, name: str) -> Projection:
    return builder.linear(f"shared_experts.{name}")
