"""The router: a token's logits, its experts and their weights (kernels/rows/route_tokens.py, docs/fp8.md §11).

Only scores have gradients; what is chosen has none.

Legend: T tokens, X experts, S experts a token, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight
from octetrl.kernels.rows.route_tokens import Routed, RoutingRule, route_tokens, scores_of, weights_of
from octetrl.models.blocks.moe.layout import Routing


class Router(nn.Module):
    """Logits float32 [T, X] of x [T, E]. Its weight [X, E] and bias [X], if any, are in the model's dtype, never FP8.

    `e_score_correction_bias` is float32 and has no gradient; None if the model has none.
    """

    def __init__(
        self,
        routing: Routing,
        hidden_size: int,
        has_bias: bool = False,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.routing = routing
        weight = torch.empty(routing.num_experts, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight.normal_(std=hidden_size**-0.5))
        self.bias = nn.Parameter(torch.zeros(routing.num_experts, dtype=dtype, device=device)) if has_bias else None
        self.e_score_correction_bias: nn.Parameter | None = None
        if routing.corrected:
            bias_X = torch.zeros(routing.num_experts, dtype=torch.float32, device=device)
            self.e_score_correction_bias = nn.Parameter(bias_X, requires_grad=False)

    def forward(self, x_TE: Tensor) -> Tensor:
        logits_TX: Tensor = _RouterFunction.apply(x_TE, self.weight, self.bias)
        return logits_TX

    def routes(self, logits_TX: Tensor) -> Routed:
        return route(logits_TX, self.e_score_correction_bias, self.routing)


class _RouterFunction(torch.autograd.Function):
    """Forward adds K in one order at any number of tokens; backward in float32."""

    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, weight_XE: Tensor, bias_X: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TE, weight_XE)
        logits_TX = bf16_gemm_straight(x_TE.contiguous(), weight_XE, torch.float32)
        return logits_TX if bias_X is None else logits_TX.add_(bias_X)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TE, weight_XE = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dx_TE = (grads[0] @ weight_XE.float()).to(x_TE.dtype) if need_x else None
        dweight_XE = (grads[0].t() @ x_TE.float()).to(weight_XE.dtype) if need_weight else None
        return dx_TE, dweight_XE, grads[0].sum(0).to(weight_XE.dtype) if need_bias else None


def route(logits_TX: Tensor, bias_X: Tensor | None, routing: Routing) -> Routed:
    """Differentiable: weights and scores have gradients, the chosen experts have none."""
    return Routed(*_RouteFunction.apply(logits_TX, bias_X, rule_of(routing)))


def rule_of(routing: Routing) -> RoutingRule:
    """The kernel's arguments."""
    return RoutingRule(
        top_k=routing.top_k,
        softmax=routing.scoring == "softmax",
        renormalise=routing.renormalise,
        num_groups=routing.num_groups,
        kept_groups=routing.kept_groups,
        scale=routing.scale,
    )


class _RouteFunction(torch.autograd.Function):
    """Backward by autograd of the definition, for the experts that the forward chose."""

    @staticmethod
    def forward(ctx: Any, logits_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> tuple[Tensor, ...]:
        routed = route_tokens(logits_TX, bias_X, rule)
        ctx.save_for_backward(logits_TX, routed.expert_TS)
        ctx.mark_non_differentiable(routed.expert_TS)
        ctx.rule = rule
        return tuple(routed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TX, expert_TS = ctx.saved_tensors
        with torch.enable_grad():
            leaf_TX = logits_TX.detach().requires_grad_()
            score_TX = scores_of(leaf_TX, ctx.rule)
            weight_TS = weights_of(score_TX, expert_TS, ctx.rule)
        (dlogits_TX,) = torch.autograd.grad((weight_TS, score_TX), leaf_TX, (grads[1], grads[2]))
        return dlogits_TX, None, None
