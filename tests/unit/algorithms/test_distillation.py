"""Distillation against sums over the whole vocabulary in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.distillation import divergence_loss, teacher_advantages
from octetrl.algorithms.token_loss import LossInputs
from octetrl.algorithms.token_rewards import TokenRewards
from tests.objectives import objective
from tests.unit.layers.test_top_logprobs import with_rest

N, V = 7, 11


def distributions(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(N, V, generator=draw, dtype=torch.float64) * 2 for _ in range(2))  # type: ignore[return-value]


def loss_of(policy_NV: Tensor, teacher_NV: Tensor, k: int, kind: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Through the function under test; `policy_NV` are logits with a gradient."""
    ids_NK = teacher_NV.topk(k).indices
    teacher_NK1, policy_NK1 = (with_rest(logits_NV.log_softmax(1), ids_NK) for logits_NV in (teacher_NV, policy_NV))
    inputs = LossInputs(
        logprobs_N=policy_NK1[:, 0].float(),
        entropy_N=torch.zeros(N),
        advantages_N=torch.ones(N),
        sequence_N=torch.zeros(N, dtype=torch.int64),
        num_sequences=1,
        reference_logprobs_N=teacher_NK1[:, 0].float(),
        teacher_top_logprobs_NK1=teacher_NK1.float(),
        top_logprobs_NK1=policy_NK1.float(),
    )
    result = divergence_loss(inputs, objective(name="distill", teacher="t", distillation=kind))
    return result.loss_N, dict(result.metrics)


def dense(policy_NV: Tensor, teacher_NV: Tensor, k: int, kind: str) -> Tensor:
    """KL of the distributions over the teacher's top-k tokens and one bucket for all others, place by place."""
    losses = []
    for policy_V, teacher_V in zip(policy_NV.softmax(1), teacher_NV.softmax(1), strict=True):
        top = teacher_V.argsort(descending=True)
        p = [policy_V[i] for i in top[:k]] + [sum((policy_V[i] for i in top[k:]), torch.zeros((), dtype=torch.float64))]
        q = [teacher_V[i] for i in top[:k]] + [
            sum((teacher_V[i] for i in top[k:]), torch.zeros((), dtype=torch.float64))
        ]
        pairs = [(a, b) if kind == "reverse_kl" else (b, a) for a, b in zip(p, q, strict=True)]
        losses.append(sum(a * (a / b).log() for a, b in pairs if float(a) > 0))
    return torch.stack(losses)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("k", [1, 4, V - 1])
@pytest.mark.parametrize("peaked", [1.0, 12.0])
def test_value_and_gradient_are_the_sums(kind: str, k: int, peaked: float) -> None:
    """`peaked`: a teacher whose other tokens have as little as 1e-20 together."""
    policy_NV, teacher_NV = distributions()
    teacher_NV *= peaked
    policy_NV.requires_grad_()
    loss_N, _ = loss_of(policy_NV, teacher_NV, k, kind)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), policy_NV)
    expected_N = dense(policy_NV, teacher_NV, k, kind)
    (expected_NV,) = torch.autograd.grad(expected_N.sum(), policy_NV)
    torch.testing.assert_close(loss_N.double(), expected_N, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient_NV, expected_NV, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_with_all_tokens_it_is_the_kl_and_with_fewer_never_more(kind: str) -> None:
    policy_NV, teacher_NV = distributions()
    p_NV, q_NV = policy_NV.log_softmax(1), teacher_NV.log_softmax(1)
    above_NV, below_NV = (p_NV, q_NV) if kind == "reverse_kl" else (q_NV, p_NV)
    whole_N = (above_NV.exp() * (above_NV - below_NV)).sum(1)
    before_N = torch.zeros(N)
    for k in range(1, V + 1):
        loss_N, _ = loss_of(policy_NV, teacher_NV, k, kind)
        assert (loss_N >= before_N - 1e-4).all()
        before_N = loss_N
    torch.testing.assert_close(before_N.double(), whole_N, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("k", [2, V])
def test_a_policy_that_is_the_teacher_has_nothing_to_learn(kind: str, k: int) -> None:
    policy_NV, _ = distributions()
    logits_NV = policy_NV.clone().requires_grad_()
    loss_N, metrics = loss_of(logits_NV, policy_NV, k, kind)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    assert loss_N.abs().max() < 1e-6 and gradient_NV.abs().max() < 1e-6
    assert torch.equal(metrics["distill/teacher_mass"], metrics["distill/policy_mass"])


def test_sampled_tokens_have_the_teachers_view_as_advantage() -> None:
    log_ratio_N = torch.tensor([0.5, -2.0, 0.0])
    rewards = TokenRewards(
        outcome_N=torch.ones(3),
        sequence_N=torch.tensor([0, 0, 1]),
        num_sequences=2,
        is_last_N=torch.tensor([False, True, True]),
        kl_N=log_ratio_N,
    )
    assert teacher_advantages(rewards).tolist() == [-0.5, 2.0, 0.0]
