"""A token's experts and their weights, from its router logits (docs/fp8.md §11).

    score    softmax(logits) over all experts, or sigmoid(logits)
    choice   score + bias; the experts of groups that are not kept are left out
    chosen   the largest choices; a tie goes to the lowest id; written by ascending id
    weight   score / (sum of the chosen scores) * scale, or score * scale

One program a token: a token is one tree of maxima and one of sums over all experts, whatever the number of tokens. Ids
are found by repeated maxima and written at their rank among the chosen, so nothing is sorted.

T tokens, X experts, S experts a token, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_SUM = 1e-20  # added to a sum of sigmoids, which may all be 0
BEST_OF_A_GROUP = 2


class RoutingRule(NamedTuple):
    """What `Routing` of models/blocks/moe/layout.py says of scores and choices."""

    top_k: int
    softmax: bool  # else sigmoid
    renormalise: bool
    num_groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0


class Routed(NamedTuple):
    expert_TS: Tensor  # int64, ascending in each row
    weight_TS: Tensor  # float32
    score_TX: Tensor  # float32


@triton.jit
def _largest(choice_N, index_N, taken_N, NUM: tl.constexpr):
    """The lowest index among the largest that are not taken. NaN counts as the largest."""
    rank_N = tl.where(choice_N != choice_N, float("inf"), choice_N)
    rank_N = tl.where(taken_N == 1, float("-inf"), rank_N)
    largest = tl.max(rank_N, 0)
    return tl.min(tl.where((rank_N == largest) & (taken_N == 0), index_N, NUM), 0)


@triton.jit
def _route_tokens_kernel(
    logits_ptr, bias_ptr, expert_ptr, weight_ptr, score_ptr, scale,
    EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, SMALLEST_SUM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    index_X = tl.arange(0, BLOCK_X)
    is_expert_X = index_X < EXPERTS
    logit_X = tl.load(logits_ptr + token * EXPERTS + index_X, mask=is_expert_X, other=float("-inf"))
    if SOFTMAX:
        power_X = tl.exp(logit_X - tl.max(logit_X, 0))
        score_X = tl.div_rn(power_X, tl.sum(power_X, 0))
    else:
        score_X = tl.div_rn(1.0, 1.0 + tl.exp(-logit_X))
    tl.store(score_ptr + token * EXPERTS + index_X, score_X, mask=is_expert_X)
    choice_X = score_X
    if HAS_BIAS:
        choice_X += tl.load(bias_ptr + index_X, mask=is_expert_X, other=0.0)
    taken_X = tl.where(is_expert_X, 0, 1)
    if KEPT < GROUPS:
        group_X = index_X // (EXPERTS // GROUPS)
        left_X = tl.full([BLOCK_X], 1, tl.int32)  # 0 in kept groups
        for _ in tl.static_range(KEPT):
            best, best_group = float("-inf"), 0
            for group in tl.static_range(GROUPS):
                others_X = tl.where(is_expert_X & (group_X == group), 0, 1)
                one = _largest(choice_X, index_X, others_X, BLOCK_X)
                two = _largest(choice_X, index_X, tl.where(index_X == one, 1, others_X), BLOCK_X)
                two_best_X = tl.where((index_X == one) | (index_X == two), choice_X, 0.0)
                kept = tl.max(tl.where((group_X == group) & is_expert_X, 1 - left_X, 0), 0)
                value = tl.sum(two_best_X, 0)
                value = tl.where(value != value, float("inf"), value)
                value = tl.where(kept == 1, float("-inf"), value)
                best_group = tl.where(value > best, group, best_group)
                best = tl.maximum(value, best)
            left_X = tl.where(group_X == best_group, 0, left_X)
        taken_X = tl.maximum(taken_X, left_X)
    chosen_X = tl.zeros([BLOCK_X], tl.int32)
    for _ in tl.static_range(TOP_K):
        best = _largest(choice_X, index_X, taken_X, BLOCK_X)
        chosen_X = tl.where(index_X == best, 1, chosen_X)
        taken_X = tl.where(index_X == best, 1, taken_X)
    weight_X = score_X
    if RENORMALISE:
        total = tl.sum(tl.where(chosen_X == 1, score_X, 0.0), 0)
        if not SOFTMAX:
            total += SMALLEST_SUM
        weight_X = tl.div_rn(weight_X, total)
    place_X = token * TOP_K + tl.cumsum(chosen_X, 0) - 1
    tl.store(expert_ptr + place_X, index_X.to(tl.int64), mask=chosen_X == 1)
    tl.store(weight_ptr + place_X, weight_X * scale, mask=chosen_X == 1)


def route_tokens_triton(logits_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> Routed:
    """The launcher. logits float32, contiguous."""
    tokens, experts = logits_TX.shape
    assert logits_TX.dtype == torch.float32 and logits_TX.is_contiguous(), "route_tokens: logits are float32"
    expert_TS = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits_TX.device)
    weight_TS = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits_TX.device)
    score_TX = torch.empty_like(logits_TX)
    options = {"enable_fp_fusion": False} if logits_TX.is_cuda else {}
    if tokens:
        _route_tokens_kernel[(tokens,)](
            logits_TX, bias_X, expert_TS, weight_TS, score_TX, rule.scale,
            EXPERTS=experts, BLOCK_X=triton.next_power_of_2(experts), TOP_K=rule.top_k, SOFTMAX=rule.softmax,
            HAS_BIAS=bias_X is not None, RENORMALISE=rule.renormalise, GROUPS=rule.num_groups, KEPT=rule.kept_groups,
            SMALLEST_SUM=SMALLEST_SUM, num_warps=1 if experts <= 128 else 4, **options,
        )  # fmt: skip
    return Routed(expert_TS, weight_TS, score_TX)


def route_tokens_reference(logits_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> Routed:
    """In plain torch, differentiable; scores and sums in float64, rounded to float32."""
    score_TX = scores_of(logits_TX, rule)
    choice_TX = score_TX.detach()
    if bias_X is not None:
        choice_TX = choice_TX + bias_X
    if rule.kept_groups < rule.num_groups:
        choice_TX = _only_kept_groups(choice_TX, rule)
    expert_TS = _best(choice_TX, rule.top_k)
    return Routed(expert_TS, weights_of(score_TX, expert_TS, rule), score_TX)


def scores_of(logits_TX: Tensor, rule: RoutingRule) -> Tensor:
    """The scores of all experts, differentiable."""
    wide_TX = logits_TX.double()
    return (wide_TX.softmax(1) if rule.softmax else wide_TX.sigmoid()).float()


def weights_of(score_TX: Tensor, expert_TS: Tensor, rule: RoutingRule) -> Tensor:
    """The weights of chosen experts, differentiable."""
    weight_TS = score_TX.gather(1, expert_TS)
    if rule.renormalise:
        sum_T1 = weight_TS.double().sum(1, keepdim=True)
        sum_T1 = sum_T1 if rule.softmax else sum_T1 + SMALLEST_SUM
        weight_TS = weight_TS / sum_T1.float()
    return weight_TS * rule.scale


def route_tokens(logits_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> Routed:
    """Not differentiable on a GPU. logits float32 [T, X], bias float32 [X] or None."""
    route = route_tokens_triton if logits_TX.is_cuda else route_tokens_reference
    return route(logits_TX, bias_X, rule)


def _best(choice_TN: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest, ascending; the lowest ids of equals. NaN counts as the largest."""
    order_TN = torch.sort(choice_TN, dim=1, descending=True, stable=True).indices
    return order_TN[:, :count].sort(dim=1).values


def _only_kept_groups(choice_TX: Tensor, rule: RoutingRule) -> Tensor:
    choice_TGN = choice_TX.view(-1, rule.num_groups, choice_TX.shape[1] // rule.num_groups)
    best_TG2 = choice_TGN.sort(dim=2, descending=True).values[:, :, :BEST_OF_A_GROUP]
    score_TG = best_TG2.double().sum(2).float()
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, _best(score_TG, rule.kept_groups), True)
    return choice_TGN.masked_fill(~kept_TG[:, :, None], -torch.inf).view_as(choice_TX)
