"""Training's lm_head on a GPU: gradients over several groups of chunks, their sum, their memory, and bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm.linear_logprobs import linear_logprobs, lm_head_logits, logprobs_of
from octetrl.kernels.gemm.linear_logprobs_backward import (
    GATHERED,
    add_product,
    logits_gradient_reference,
    logits_gradient_triton,
)

pytestmark = pytest.mark.gpu


def _normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("entropy", [0.0, 0.1])
@pytest.mark.parametrize("num_rows", [64, 1000])
def test_gradients_over_groups_of_chunks(num_rows: int, entropy: float) -> None:
    """64 rows are one group; 1000 are two, the last one ragged, its last chunk too."""
    chunk, vocab_size = 150, 70_001
    assert 64 < GATHERED * chunk < 1000
    inputs = [_normal(num_rows, 512), _normal(vocab_size, 512, seed=1) / 8]
    targets_N = torch.arange(num_rows, device="cuda") * 67
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    logprobs_N, entropy_N = linear_logprobs(*leaves, targets_N, 0.7, chunk)
    (logprobs_N.mean() + (entropy * entropy_N.mean() if entropy else 0.0)).backward()
    exact = [tensor.float().requires_grad_() for tensor in inputs]
    log_p_NV = torch.log_softmax(exact[0] @ exact[1].t() / 0.7, dim=-1)
    loss = log_p_NV.gather(1, targets_N[:, None]).mean() - entropy * (log_p_NV.exp() * log_p_NV).sum(-1).mean()
    loss.backward()
    for ours, expected in zip(leaves, exact, strict=True):
        assert ours.grad is not None and expected.grad is not None
        assert relative_error(ours.grad, expected.grad) < 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_no_bit_of_the_forward(temperature: float) -> None:
    hidden_NE, weight_VE = _normal(1500, 512), _normal(151_936, 512, seed=1) / 8
    targets_N = torch.arange(1500, device="cuda")
    whole = logprobs_of(lm_head_logits(hidden_NE, weight_VE), targets_N, temperature)
    for chunk in (300, 1024):
        ours = linear_logprobs(hidden_NE, weight_VE, targets_N, temperature, chunk)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, whole, strict=True))


@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradient_kernel_is_near_the_reference(with_entropy: bool) -> None:
    logits_NV = 3 * _normal(64, 40_003).float()
    logits_NV[3, 5] = -torch.inf
    temperature_N = torch.linspace(0.5, 2.0, 64, device="cuda")
    z_NV = logits_NV / temperature_N[:, None]
    lse_N = torch.logsumexp(z_NV, -1)
    p_NV = torch.softmax(z_NV, -1)
    entropy_N = lse_N - torch.where(p_NV > 0, p_NV * z_NV, 0.0).sum(-1)
    dlogprobs_N, dentropy_N = torch.randn(2, 64, device="cuda")
    targets_N = torch.arange(64, device="cuda") * 600
    up = dentropy_N if with_entropy else None
    ours, expected = torch.full_like(logits_NV, torch.nan), torch.empty_like(logits_NV)
    logits_gradient_triton(logits_NV, targets_N, temperature_N, lse_N, entropy_N, dlogprobs_N, up, ours)
    logits_gradient_reference(logits_NV, targets_N, temperature_N, lse_N, entropy_N, dlogprobs_N, up, expected)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-7)


def test_the_sum_is_float32_and_in_place() -> None:
    """A BF16 sum would lose what is 2^-10 of it; a product of its own would show in the peak."""
    dlogits_NV, hidden_NE = _normal(256, 50_000), _normal(256, 1024, seed=1)
    sum_VE = torch.full((50_000, 1024), torch.nan, device="cuda")
    add_product(sum_VE, dlogits_NV, hidden_NE, first=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product(sum_VE, (dlogits_NV * 2**-10), hidden_NE, first=False)
    assert torch.cuda.max_memory_allocated() - before < sum_VE.nbytes // 2
    exact = (dlogits_NV.float() * (1 + 2**-10)).t() @ hidden_NE.float()
    assert relative_error(sum_VE, exact) < 1e-5


def test_memory_does_not_grow_with_the_rows() -> None:
    """Beside what grows with N E: a chunk of logits, the gradients of GATHERED chunks, the weight's gradient."""
    chunk, vocab_size, hidden_size = 256, 151_936, 256
    weight_VE = _normal(vocab_size, hidden_size, seed=1).requires_grad_()
    for num_rows in (2048, 16_384):
        weight_VE.grad = None
        hidden_NE = _normal(num_rows, hidden_size).requires_grad_()
        targets_N = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_logprobs(hidden_NE, weight_VE, targets_N, chunk=chunk)[0].sum().backward()
        allowed = (4 + 2 * GATHERED) * chunk * vocab_size + (4 + 2) * vocab_size * hidden_size + 4 * hidden_NE.nbytes
        assert torch.cuda.max_memory_allocated() - before < allowed + (16 << 20)
