"""A few log-probs of each row against the whole log-softmax in float64, in value, gradient and memory's chunks."""

from __future__ import annotations

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


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("below", [V, 31])
def test_the_likeliest(chunk: int, below: int) -> None:
    hidden_NE, weight_VE = operands()
    ids_NK, logprobs_NK = top_logprobs(hidden_NE, weight_VE, K, below=below, temperature=TEMPERATURE, chunk=chunk)
    values_NK, expected_NK = whole(hidden_NE, weight_VE)[:, :below].topk(K, dim=1)
    assert torch.equal(ids_NK, expected_NK)
    torch.testing.assert_close(logprobs_NK.double(), values_NK, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_given_tokens_and_their_gradient(dtype: torch.dtype, chunk: int) -> None:
    hidden_NE, weight_VE = (tensor.requires_grad_() for tensor in operands(dtype))
    ids_NK = torch.stack([torch.randperm(V)[:K] for _ in range(N)])
    upstream_NK = torch.randn(N, K)
    logprobs_NK = logprobs_at(hidden_NE, weight_VE, ids_NK, temperature=TEMPERATURE, chunk=chunk)
    gradients = torch.autograd.grad(logprobs_NK, (hidden_NE, weight_VE), upstream_NK)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_NE, weight_VE)]
    expected_NK = whole(*exact).gather(1, ids_NK)
    wanted = torch.autograd.grad(expected_NK, exact, upstream_NK.double())
    torch.testing.assert_close(logprobs_NK.double(), expected_NK, rtol=1e-5, atol=1e-5)
    rounding = 1e-5 if dtype == torch.float32 else 1e-2
    for gradient, reference in zip(gradients, wanted, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), reference, rtol=rounding, atol=rounding)


def test_of_one_token_it_is_the_log_prob_of_a_target() -> None:
    hidden_NE, weight_VE = operands(torch.bfloat16)
    targets_N = torch.arange(N) % V
    logprobs_N1 = logprobs_at(hidden_NE, weight_VE, targets_N[:, None], temperature=TEMPERATURE, chunk=5)
    expected_N, _ = linear_logprobs(hidden_NE, weight_VE, targets_N, TEMPERATURE)
    torch.testing.assert_close(logprobs_N1[:, 0], expected_N, rtol=1e-5, atol=1e-5)


def test_no_rows_have_zero_gradients() -> None:
    hidden_NE, weight_VE = (tensor.requires_grad_() for tensor in operands())
    made_NK = logprobs_at(hidden_NE[:0], weight_VE, torch.zeros(0, K, dtype=torch.int64), temperature=1.0, chunk=4)
    (gradient_VE,) = torch.autograd.grad(made_NK.sum(), weight_VE)
    assert not gradient_VE.any()
