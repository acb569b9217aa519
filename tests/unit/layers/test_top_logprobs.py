"""A few log-probs of each row against the whole log-softmax in float64, in value, gradient and memory's chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octetrl.kernels.gemm.linear_logprobs import linear_logprobs
from octetrl.layers.top_logprobs import logprobs_at, top_logprobs

N, V, E, K = 13, 40, 16, 5
TEMPERATURE = 0.7


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(N, E, generator=draw).to(dtype), (torch.randn(V, E, generator=draw) * 0.5).to(dtype)


def whole(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    return (hidden_NE.double() @ weight_VE.double().t() / TEMPERATURE).log_softmax(1)


def with_rest(logprobs_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Those of the ids and, last, of all others together."""
    others_NV = logprobs_NV.scatter(1, ids_NK, -torch.inf)
    return torch.cat([logprobs_NV.gather(1, ids_NK), others_NV.logsumexp(1, keepdim=True)], dim=1)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("below", [V, 31])
def test_the_likeliest(chunk: int, below: int) -> None:
    hidden_NE, weight_VE = operands()
    ids_NK, logprobs_NK1 = top_logprobs(hidden_NE, weight_VE, K, below=below, temperature=TEMPERATURE, chunk=chunk)
    expected_NK = whole(hidden_NE, weight_VE)[:, :below].topk(K, dim=1).indices
    assert torch.equal(ids_NK, expected_NK)
    exact_NK1 = with_rest(whole(hidden_NE, weight_VE), ids_NK)
    torch.testing.assert_close(logprobs_NK1.double(), exact_NK1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("peaked", [1.0, 30.0])
def test_given_tokens_and_their_gradient(dtype: torch.dtype, chunk: int, peaked: float) -> None:
    """`peaked`: the others of a row have a probability far below float32's step under 1."""
    hidden_NE, weight_VE = operands(dtype)
    ids_NK = (hidden_NE @ weight_VE.t()).topk(K, dim=1).indices
    if peaked == 1.0:
        ids_NK = torch.stack([torch.randperm(V)[:K] for _ in range(N)])
    hidden_NE, weight_VE = (hidden_NE * peaked).requires_grad_(), weight_VE.requires_grad_()
    upstream_NK1 = torch.randn(N, K + 1)
    logprobs_NK1 = logprobs_at(hidden_NE, weight_VE, ids_NK, temperature=TEMPERATURE, chunk=chunk)
    assert (peaked > 1.0) == bool((logprobs_NK1[:, -1] < math.log(1e-9)).any())
    gradients = torch.autograd.grad(logprobs_NK1, (hidden_NE, weight_VE), upstream_NK1)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_NE, weight_VE)]
    expected_NK1 = with_rest(whole(*exact), ids_NK)
    wanted = torch.autograd.grad(expected_NK1, exact, upstream_NK1.double())
    torch.testing.assert_close(logprobs_NK1.double(), expected_NK1, rtol=1e-5, atol=1e-5)
    rounding = (1e-5 if dtype == torch.float32 else 1e-2) * peaked
    for gradient, reference in zip(gradients, wanted, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), reference, rtol=rounding, atol=rounding)


def test_the_log_prob_of_a_nearly_certain_token_does_not_have_the_rounding_of_its_logit() -> None:
    """Logits of 123 have steps of 7.6e-6 in float32, and a KL adds up such log-probs."""
    weight_VE = torch.tensor([[123.456], [110.0], [3.0]])
    ids_N1 = torch.tensor([[0]])
    made_N2 = logprobs_at(torch.ones(1, 1), weight_VE, ids_N1, temperature=1.0, chunk=4)
    found_N2 = top_logprobs(torch.ones(1, 1), weight_VE, 1, below=3, temperature=1.0, chunk=4)[1]
    assert torch.equal(made_N2, found_N2)
    assert made_N2[0, 0].item() == pytest.approx(-1.433e-6, abs=6e-8)


def test_of_all_tokens_none_is_another() -> None:
    hidden_NE, weight_VE = (tensor.requires_grad_() for tensor in operands())
    ids_NV, logprobs_NV1 = top_logprobs(hidden_NE, weight_VE, V, below=V, temperature=TEMPERATURE, chunk=4)
    assert (logprobs_NV1[:, -1] == -torch.inf).all()
    made_NV1 = logprobs_at(hidden_NE, weight_VE, ids_NV, temperature=TEMPERATURE, chunk=4)
    assert torch.equal(made_NV1, logprobs_NV1)
    (gradient_NE,) = torch.autograd.grad(made_NV1[:, :-1].exp().sum(), hidden_NE)
    assert gradient_NE.abs().max() < 1e-5  # probabilities add up to 1


def test_of_one_token_it_is_the_log_prob_of_a_target() -> None:
    hidden_NE, weight_VE = operands(torch.bfloat16)
    targets_N = torch.arange(N) % V
    logprobs_N2 = logprobs_at(hidden_NE, weight_VE, targets_N[:, None], temperature=TEMPERATURE, chunk=5)
    expected_N, _ = linear_logprobs(hidden_NE, weight_VE, targets_N, TEMPERATURE)
    torch.testing.assert_close(logprobs_N2[:, 0], expected_N, rtol=1e-5, atol=1e-5)


def test_no_rows_have_zero_gradients() -> None:
    hidden_NE, weight_VE = (tensor.requires_grad_() for tensor in operands())
    made_NK1 = logprobs_at(hidden_NE[:0], weight_VE, torch.zeros(0, K, dtype=torch.int64), temperature=1.0, chunk=4)
    (gradient_VE,) = torch.autograd.grad(made_NK1.sum(), weight_VE)
    assert not gradient_VE.any()
