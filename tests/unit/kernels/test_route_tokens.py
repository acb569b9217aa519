"""Routing: the kernel (interpreted) against the reference, which tests/unit/models/test_moe.py holds to the formula."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows.route_tokens import RoutingRule, route_tokens, route_tokens_triton

RULES = {
    "softmax": (8, RoutingRule(3, softmax=True, renormalise=True)),
    "not a power of two": (6, RoutingRule(6, softmax=True, renormalise=False)),
    "sigmoid": (12, RoutingRule(3, softmax=False, renormalise=True, scale=2.5)),
    "groups": (8, RoutingRule(3, softmax=False, renormalise=True, num_groups=4, kept_groups=2, scale=2.5)),
}


@pytest.mark.parametrize("name", RULES)
def test_the_kernel_is_the_reference(name: str) -> None:
    experts, rule = RULES[name]
    generator = torch.Generator().manual_seed(experts)
    logits_TX = torch.randn(12, experts, generator=generator) * 2
    logits_TX[:6] = logits_TX[:6].round()  # ties
    logits_TX[6], logits_TX[7] = 0.0, -200.0  # sigmoids of 0
    bias_X = None if rule.softmax else torch.randn(experts, generator=generator).div(4)
    for bias in {id(one): one for one in (bias_X, None)}.values():
        found, want = route_tokens_triton(logits_TX, bias, rule), route_tokens(logits_TX, bias, rule)
        assert torch.equal(found.expert_TS, want.expert_TS) and found.weight_TS.isfinite().all()
        torch.testing.assert_close(found.weight_TS, want.weight_TS, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.score_TX, want.score_TX, rtol=1e-6, atol=0)


def test_weights_are_0_if_all_scores_are() -> None:
    found = route_tokens(torch.full((1, 8), -200.0), None, RULES["groups"][1])
    assert found.weight_TS.tolist() == [[0.0] * 3]


@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_what_is_not_finite_stays_so(name: str) -> None:
    logits_TX = torch.zeros(2, 8)
    logits_TX[0, 5], logits_TX[1] = torch.nan, torch.nan
    rule = RULES[name][1]
    found = route_tokens_triton(logits_TX, None, rule)
    assert found.weight_TS.isnan().all() and torch.equal(found.expert_TS, route_tokens(logits_TX, None, rule).expert_TS)
