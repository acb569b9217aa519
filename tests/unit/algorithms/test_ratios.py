"""The KL estimators' values and gradients as exact expectations over a small vocabulary, so nothing is sampled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.ratios import MAX_LOG_RATIO, kl_estimate, token_ratio


@pytest.fixture
def logits_V() -> Tensor:
    return torch.randn(7, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def reference_V() -> Tensor:
    return torch.randn(7, dtype=torch.float64).log_softmax(0)


def forward_and_reverse_kl(logprobs_V: Tensor, reference_V: Tensor) -> tuple[Tensor, Tensor]:
    forward = (reference_V.exp() * (reference_V - logprobs_V)).sum()
    return forward, (logprobs_V.exp() * (logprobs_V - reference_V)).sum()


def gradient_of_loss(logits_V: Tensor, reference_V: Tensor, estimator: str) -> Tensor:
    """Of E_p[estimate], with the tokens drawn from p and only the estimate differentiated, as in training."""
    logprobs_V = logits_V.log_softmax(0)
    loss = (logprobs_V.exp().detach() * kl_estimate(logprobs_V, reference_V, estimator)).sum()
    return torch.autograd.grad(loss, logits_V)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_value(logits_V: Tensor, reference_V: Tensor, estimator: str) -> None:
    logprobs_V = logits_V.detach().log_softmax(0)
    _, reverse = forward_and_reverse_kl(logprobs_V, reference_V)
    estimate = (logprobs_V.exp() * kl_estimate(logprobs_V, reference_V, estimator)).sum()
    torch.testing.assert_close(estimate, reverse)


def test_k2_is_biased_but_close_when_the_policies_are(logits_V: Tensor) -> None:
    logprobs_V = logits_V.detach().log_softmax(0)
    reference_V = (logits_V.detach() + 0.05 * torch.randn(7, dtype=torch.float64)).log_softmax(0)
    _, reverse = forward_and_reverse_kl(logprobs_V, reference_V)
    estimate = (logprobs_V.exp() * kl_estimate(logprobs_V, reference_V, "k2")).sum()
    torch.testing.assert_close(estimate, reverse, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_gradient_of_the_reverse_kl(logits_V: Tensor, reference_V: Tensor, estimator: str) -> None:
    _, reverse = forward_and_reverse_kl(logits_V.log_softmax(0), reference_V)
    expected = torch.autograd.grad(reverse, logits_V)[0]
    torch.testing.assert_close(gradient_of_loss(logits_V, reference_V, estimator), expected)


def test_k3_has_the_gradient_of_the_forward_kl(logits_V: Tensor, reference_V: Tensor) -> None:
    forward, _ = forward_and_reverse_kl(logits_V.log_softmax(0), reference_V)
    expected = torch.autograd.grad(forward, logits_V)[0]
    torch.testing.assert_close(gradient_of_loss(logits_V, reference_V, "k3"), expected)


def test_the_plain_k1_would_not_penalise_at_all(logits_V: Tensor, reference_V: Tensor) -> None:
    logprobs_V = logits_V.log_softmax(0)
    loss = (logprobs_V.exp().detach() * (logprobs_V - reference_V)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits_V)[0], torch.zeros_like(logits_V))


def test_an_extreme_ratio_stays_finite_in_value_and_gradient() -> None:
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    ratio = token_ratio(logprobs, torch.tensor([-200.0, 0.0]))
    ratio.sum().backward()
    assert ratio.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert ratio[0] == torch.tensor(MAX_LOG_RATIO).exp()
