"""Log-probs and entropy against log_softmax, and their bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.kernels.gemm.linear_logprobs import (
    LARGE_VOCAB,
    LOGIT_ROWS,
    VOCAB_CHUNK,
    linear_logprobs,
    lm_head_logits,
    logprobs_alone,
    logprobs_of,
    padded_rows,
    statistics_reference,
    statistics_triton,
)

N, V, E = 11, 301, 24


def inputs(num_rows: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NE = torch.randn(num_rows, E, generator=generator).to(dtype)
    weight_VE = torch.randn(V, E, generator=generator).to(dtype)
    return hidden_NE, weight_VE, torch.randint(V, (num_rows,), generator=generator)


def exact(hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p_NV = torch.log_softmax(hidden_NE @ weight_VE.t() / temperature, dim=-1)
    return log_p_NV.gather(1, targets_N[:, None]).squeeze(1), -(log_p_NV.exp() * log_p_NV).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_log_softmax(dtype: torch.dtype, temperature: float) -> None:
    hidden_NE, weight_VE, targets_N = inputs(dtype=dtype)
    expected = exact(hidden_NE.double(), weight_VE.double(), targets_N, temperature)
    for ours, wanted in zip(linear_logprobs(hidden_NE, weight_VE, targets_N, temperature), expected, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)


def test_engine_and_trainer_get_the_same_bits_in_any_company() -> None:
    hidden_NE, weight_VE, targets_N = inputs(dtype=torch.bfloat16)
    trainer = linear_logprobs(hidden_NE, weight_VE, targets_N, 0.7, chunk=4)
    for row in range(N):
        engine = logprobs_of(lm_head_logits(hidden_NE[row : row + 1], weight_VE), targets_N[row : row + 1], 0.7)
        assert torch.equal(engine[0][0], trainer[0][row]) and torch.equal(engine[1][0], trainer[1][row])


def test_a_temperature_for_each_row() -> None:
    hidden_NE, weight_VE, targets_N = inputs()
    logits_NV = lm_head_logits(hidden_NE, weight_VE)
    temperature_N = torch.linspace(0.5, 2.0, N)
    mixed_N, _ = logprobs_of(logits_NV, targets_N, temperature_N)
    for row in range(N):
        alone_N, _ = logprobs_of(logits_NV[row : row + 1], targets_N[row : row + 1], float(temperature_N[row]))
        assert torch.equal(alone_N[0], mixed_N[row])


def test_an_excluded_token_keeps_the_entropy_finite() -> None:
    logits_NV = torch.tensor([[0.0, 0.0, -torch.inf]])
    logprobs_N, entropy_N = logprobs_of(logits_NV, torch.tensor([0]))
    assert logprobs_N.item() == pytest.approx(-0.6931472) and entropy_N.item() == pytest.approx(0.6931472)


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(AssertionError, match="temperature above 0"):
        logprobs_of(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), 0.0)


def test_kernels_are_near_the_reference() -> None:
    """Two chunks of the vocabulary, the last one ragged; one logit excluded, then a whole chunk."""
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(4, VOCAB_CHUNK + 100, generator=generator)
    logits_NV[1, 5] = -torch.inf
    logits_NV[3, :VOCAB_CHUNK] = -torch.inf
    targets_N, temperature_N = torch.tensor([0, 6, VOCAB_CHUNK, VOCAB_CHUNK + 99]), torch.tensor([1.0, 0.7, 2.0, 1.0])
    statistics = statistics_reference(logits_NV, targets_N, temperature_N)
    for ours, expected in zip(statistics_triton(logits_NV, targets_N, temperature_N), statistics, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_temperature_one_has_the_bits_of_a_division_by_one() -> None:
    """Its kernel leaves the division out; a temperature next to 1 does not."""
    logits_NV = 30 * torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    targets_N, temperature_N = torch.tensor([0, 499]), torch.tensor([1.0, 1.0 + 2**-20])
    for n in range(2):
        one = slice(n, n + 1)
        ours = statistics_triton(logits_NV[one], targets_N[one], temperature_N[one])
        divided = statistics_triton(logits_NV[one] / temperature_N[one, None], targets_N[one], torch.ones(1))
        assert all(torch.equal(a, b) for a, b in zip(ours, divided, strict=True))


def test_a_row_has_the_same_bits_alone_and_without_the_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(3, 2 * VOCAB_CHUNK + 8, generator=generator)
    targets_N, temperature_N = torch.tensor([0, VOCAB_CHUNK, 2 * VOCAB_CHUNK]), torch.tensor([1.0, 0.7, 2.0])
    together = statistics_triton(logits_NV, targets_N, temperature_N)
    bare = statistics_triton(logits_NV, targets_N, temperature_N, entropy=False)
    assert torch.equal(bare.logprobs_N, together.logprobs_N) and torch.equal(bare.lse_N, together.lse_N)
    for n in range(3):
        one = slice(n, n + 1)
        alone = statistics_triton(logits_NV[one], targets_N[one], temperature_N[one])
        assert all(torch.equal(mine, whole[one]) for mine, whole in zip(alone, together, strict=True))


def test_logprobs_alone_are_those_of_both() -> None:
    hidden_NE, weight_VE, targets_N = inputs()
    logits_NV = lm_head_logits(hidden_NE, weight_VE)
    assert torch.equal(logprobs_alone(logits_NV, targets_N, 0.7), logprobs_of(logits_NV, targets_N, 0.7)[0])


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "expected"),
    [
        (0, 151_936, []),
        (1, 151_936, [16]),
        (16, 151_936, [16]),
        (17, 151_936, [32]),
        (200, 151_936, [256]),
        (1024, 151_936, [1024]),
        (2100, 151_936, [1024, 1024, 64]),
        (1, 32_000, [256]),
        (300, 32_000, [256, 256]),
    ],
)
def test_rows_are_padded_to_shapes_with_known_bits(num_rows: int, vocab_size: int, expected: list[int]) -> None:
    assert list(LOGIT_ROWS) == sorted(LOGIT_ROWS) and LARGE_VOCAB > 32_000
    assert padded_rows(num_rows, vocab_size) == expected
