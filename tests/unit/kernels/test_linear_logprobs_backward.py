"""Gradients of log-prob and entropy against float64 autograd, their kernel against plain torch, and their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octetrl.kernels.gemm.linear_logprobs import linear_logprobs, statistics_reference
from octetrl.kernels.gemm.linear_logprobs_backward import (
    GATHERED,
    VOCAB_BLOCK,
    add_product,
    logits_gradient_reference,
    logits_gradient_triton,
)
from tests.unit.kernels.test_linear_logprobs import E, N, V, exact, inputs


@pytest.mark.parametrize("chunk", [1, 3, 100])  # three groups of chunks, one of ragged chunks, one chunk
def test_gradients_of_logprob_and_entropy(chunk: int) -> None:
    hidden_NE, weight_VE, targets_N = inputs()
    upstream = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    exact_hidden, exact_weight = hidden_NE.double().requires_grad_(), weight_VE.double().requires_grad_()
    torch.autograd.backward(exact(exact_hidden, exact_weight, targets_N, 0.7), tuple(upstream.double()))
    hidden_NE.requires_grad_()
    weight_VE.requires_grad_()
    torch.autograd.backward(linear_logprobs(hidden_NE, weight_VE, targets_N, 0.7, chunk), tuple(upstream))
    assert hidden_NE.grad is not None and weight_VE.grad is not None
    torch.testing.assert_close(hidden_NE.grad.double(), exact_hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_VE.grad.double(), exact_weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_one_result_alone(which: int) -> None:
    """The half that nobody differentiates is left out, not guessed."""
    hidden_NE, weight_VE, targets_N = inputs()
    gradients = []
    for function in (lambda h, w: linear_logprobs(h, w, targets_N, 0.7, 2), lambda h, w: exact(h, w, targets_N, 0.7)):
        leaves = [hidden_NE.double() if gradients else hidden_NE, weight_VE.double() if gradients else weight_VE]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        gradients.append(torch.autograd.grad(function(*leaves)[which].sum(), leaves))
    for ours, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5)


def test_no_rows_have_no_gradient() -> None:
    hidden_NE, weight_VE, targets_N = (tensor[:0] if tensor.shape[0] == N else tensor for tensor in inputs())
    hidden_NE.requires_grad_()
    weight_VE.requires_grad_()
    linear_logprobs(hidden_NE, weight_VE, targets_N)[0].sum().backward()
    assert hidden_NE.grad is not None and hidden_NE.grad.shape == (0, E)
    assert weight_VE.grad is not None and not weight_VE.grad.any()


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden_NE, weight_VE, targets_N = inputs()
    hidden_NE.requires_grad_()
    linear_logprobs(hidden_NE, weight_VE, targets_N)[0].sum().backward()
    assert hidden_NE.grad is not None and weight_VE.grad is None


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_never_more_than_a_few_chunks_of_logits_exist() -> None:
    rows, chunk = 500, 16
    hidden_NE, weight_VE, targets_N = inputs(rows)
    hidden_NE.requires_grad_()
    weight_VE.requires_grad_()
    with _LargestTensor() as largest:
        logprobs_N, entropy_N = linear_logprobs(hidden_NE, weight_VE, targets_N, 1.0, chunk)
        (logprobs_N.sum() + entropy_N.sum()).backward()
    assert largest.elements <= max(GATHERED * chunk * V, rows * E, V * E) < rows * V


@pytest.mark.parametrize("with_entropy", [True, False])
def test_kernel_is_near_the_reference(with_entropy: bool) -> None:
    """Two blocks of the vocabulary, the last one ragged; one logit excluded, then a whole block."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(4, VOCAB_BLOCK + 100, generator=generator)
    logits_NV[1, 5] = -torch.inf
    logits_NV[3, :VOCAB_BLOCK] = -torch.inf
    targets_N, temperature_N = torch.tensor([0, 6, VOCAB_BLOCK, VOCAB_BLOCK + 99]), torch.tensor([1.0, 0.7, 2.0, 1.0])
    forward = statistics_reference(logits_NV, targets_N, temperature_N)
    dlogprobs_N, dentropy_N = torch.randn(2, 4, generator=generator)
    up = dentropy_N if with_entropy else None
    given = (logits_NV, targets_N, temperature_N, forward.lse_N, forward.entropy_N, dlogprobs_N, up)
    ours, expected = torch.full_like(logits_NV, torch.nan), torch.empty_like(logits_NV)
    logits_gradient_triton(*given, ours)
    logits_gradient_reference(*given, expected)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-7)


def test_the_first_product_reads_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    dlogits_NV, hidden_NE = torch.randn(N, V, generator=generator), torch.randn(N, E, generator=generator)
    sum_VE = torch.full((V, E), torch.nan)
    add_product(sum_VE, dlogits_NV, hidden_NE, first=True)
    add_product(sum_VE, dlogits_NV, hidden_NE, first=False)
    torch.testing.assert_close(sum_VE, 2 * dlogits_NV.t() @ hidden_NE)
