"""Routers whose experts have unequal loads: `--router-skew S` gives the expert of rank r a load proportional to r^-S.

Routers with random weights have unequal loads too, but no known ones. Here each router gets a correction bias, added to
its scores for the choice of experts alone (docs/fp8.md §11); a router without one gets one for the bench. One forward
of random tokens finds the biases, layer by layer, before the layer's experts are chosen: a bias goes up where an expert
has less than its load and down where it has more. Which expert has which rank is drawn by layer.

A token meets an expert at most once, so no expert has more rows than there are tokens (expert_shares.py).

T tokens, X experts, S chosen experts of a token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octetrl.bench.expert_shares import expert_shares
from octetrl.kernels.rows.route_tokens import route_tokens
from octetrl.layers.context import PackedContext
from octetrl.models.blocks.moe.routing import Router, rule_of
from octetrl.models.decoder import Decoder

SEQUENCES, MOST_TOKENS = 8, 512  # of the forward that finds the biases
ROUNDS, SLOWER = 400, 0.985


@dataclass(frozen=True, slots=True)
class Balance:
    """The loads that a forward of random tokens gives a model's experts, means over its layers."""

    load_max_over_mean: float
    idle_experts: float  # share of the experts without a row


@torch.no_grad()
def skew_routers(model: Decoder, exponent: float, seed: int) -> Balance | None:
    """Set every router's correction bias for this skew; 0 leaves them as they are. None: a dense model.

    The model's codes must be those of its weights.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        return None
    loads: list[Tensor] = []

    def look(router: nn.Module, _: tuple[Tensor, ...], logits_TX: Tensor) -> None:
        assert isinstance(router, Router)
        experts, chosen = router.routing.num_experts, router.routing.top_k
        if exponent:
            shares = list(expert_shares(experts, chosen, exponent))
            random.Random(f"{seed}/{len(loads)}").shuffle(shares)
            set_bias(router, logits_TX, shares)
        loads.append(_loads(router, logits_TX).double() / len(logits_TX) * experts / chosen)

    hooks = [router.register_forward_hook(look) for router in routers]
    length = min(MOST_TOKENS if model.lm_head_weight.is_cuda else 64, model.spec.max_positions)
    device = model.lm_head_weight.device
    generator = torch.Generator().manual_seed(seed)
    token_ids_T = torch.randint(model.spec.vocab_size, (SEQUENCES * length,), generator=generator).to(device)
    cu_seqlens_B1 = torch.arange(0, SEQUENCES * length + 1, length, dtype=torch.int32, device=device)
    context = PackedContext(cu_seqlens_B1=cu_seqlens_B1, max_seqlen=length)
    try:
        model(token_ids_T, torch.arange(length, device=device).repeat(SEQUENCES), context)
    finally:
        for hook in hooks:
            hook.remove()
    load_LX = torch.stack(loads)
    return Balance(float(load_LX.amax(1).mean()), float((load_LX == 0).double().mean()))


def set_bias(router: Router, logits_TX: Tensor, shares: Sequence[float]) -> None:
    """Give the router the bias with which each expert has about its share of these tokens."""
    wanted_X = torch.tensor(shares, dtype=torch.float32, device=logits_TX.device)
    bias = router.e_score_correction_bias
    if bias is None:
        bias = nn.Parameter(torch.zeros_like(wanted_X), requires_grad=False)
        router.e_score_correction_bias = bias
    step = float(route_tokens(logits_TX, bias, rule_of(router.routing)).score_TX.std())
    for _ in range(ROUNDS):
        share_X = _loads(router, logits_TX).float() / len(logits_TX)
        bias.add_(step * (wanted_X - share_X) / (wanted_X + share_X))
        step *= SLOWER


def _loads(router: Router, logits_TX: Tensor) -> Tensor:
    """Rows of each expert, int64 [X]."""
    routed = route_tokens(logits_TX, router.e_score_correction_bias, rule_of(router.routing))
    return torch.bincount(routed.expert_TS.flatten(), minlength=router.routing.num_experts)
