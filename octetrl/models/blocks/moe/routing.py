"""The router: a token's logits, its experts and their weights (kernels/rows/route_tokens.py, docs/fp8.md §11).

Only scores have gradients; what is chosen has none.

Legend: T tokens, X experts, S experts a token, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octetrl.kernels.rows.route_tokens import Routed, RoutingRule, route_tokens, scores_of, weights_of
from octetrl.layers.float32_product import Float32Product
from octetrl.models.blocks.moe.layout import Routing


class Router(Float32Product):
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
        super().__init__(routing.num_experts, hidden_size, has_bias, dtype=dtype, device=device)
        self.routing = routing
        self.e_score_correction_bias: nn.Parameter | None = None
        if routing.corrected:
            bias_X = torch.zeros(routing.num_experts, dtype=torch.float32, device=device)
            self.e_score_correction_bias = nn.Parameter(bias_X, requires_grad=False)

    def routes(self, logits_TX: Tensor) -> Routed:
        return route(logits_TX, self.e_score_correction_bias, self.routing)


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
