"""On the GPU: tokens against the float64 form, logits of every padding and log-probs of every company bit for bit, and
all of it from a CUDA graph."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from octetrl.engine.sampler import SamplingRows, sample, sequence_key
from octetrl.kernels.gemm.linear_logprobs import LOGIT_ROWS, lm_head_logits, logprobs_alone, logprobs_of
from octetrl.kernels.rows.sample_tokens import sample_tokens, sample_tokens_reference
from tests.gpu.compare import captured

pytestmark = pytest.mark.gpu

V = 151_936


def _rows(num_rows: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    key_N = torch.tensor([sequence_key(n, 0) for n in range(num_rows)]).cuda()
    return key_N, torch.arange(num_rows).cuda(), torch.full((num_rows,), temperature).cuda()


def _sampling_rows(num_rows: int, top_p: float) -> SamplingRows:
    key_N, counter_N, temperature_N = _rows(num_rows, 0.9)
    return SamplingRows(
        key_N=key_N,
        counter_N=counter_N,
        temperature_N=temperature_N,
        top_k_N=torch.zeros_like(key_N),
        top_p_N=torch.full_like(temperature_N, top_p),
        min_p_N=torch.zeros_like(temperature_N),
        draws=True,
        filters=top_p < 1,
    )


def _logits(num_rows: int, vocab_size: int = V, spread: float = 3.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(num_rows, vocab_size, generator=generator, device="cuda").mul_(spread)


def test_a_row_without_filters_draws_beside_filtered_ones_what_it_draws_alone() -> None:
    num_rows = 512
    rows, logits_NV = _sampling_rows(num_rows, 0.9), _logits(num_rows, spread=0.1)
    free_N = torch.arange(num_rows, device="cuda") % 2 == 0
    mixed = replace(rows, top_p_N=torch.where(free_N, 1.0, rows.top_p_N))
    token_N = sample(logits_NV, mixed)
    alone_N = sample_tokens(logits_NV, rows.key_N, rows.counter_N, rows.temperature_N)
    assert torch.equal(token_N[free_N], alone_N[free_N])
    assert torch.equal(token_N[~free_N], sample(logits_NV, rows)[~free_N])


@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
def test_tokens_are_those_of_the_reference(spread: float) -> None:
    logits_NV, rows = _logits(4096, spread=spread), _rows(4096, 0.8)
    expected_N = sample_tokens_reference(logits_NV, *rows)
    same = int((sample_tokens(logits_NV, *rows) == expected_N).sum())
    assert same >= 4092  # 99.9%


@pytest.mark.parametrize("vocab_size", [7, 32_001, V])
def test_greedy_is_the_argmax_and_bad_rows_give_minus_one(vocab_size: int) -> None:
    logits_NV = _logits(9, vocab_size)
    for row, bad in ((2, math.nan), (5, math.inf), (8, -math.inf)):
        logits_NV[row, vocab_size - 1] = bad
    expected_N = logits_NV.argmax(1)
    expected_N[[2, 5, 8]] = -1
    assert torch.equal(sample_tokens(logits_NV, *_rows(9, 0.0)), expected_N)
    assert ((sample_tokens(logits_NV, *_rows(9)) == -1) == (expected_N == -1)).all()


def test_draws_follow_the_distribution() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])
    num_draws = 100_000
    tokens = sample_tokens(logits_V.cuda().expand(num_draws, 8).contiguous(), *_rows(num_draws))
    expected_V = logits_V.double().softmax(0) * num_draws
    counts_V = torch.bincount(tokens, minlength=8).cpu()
    assert float(((counts_V - expected_V) ** 2 / expected_V).sum()) < 30  # 7 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_graph_samples_what_eager_code_does(top_p: float) -> None:
    logits_NV, rows = _logits(70, 50_000), _sampling_rows(70, top_p)
    logprobs_N = torch.empty(70, device="cuda")

    def step() -> Tensor:
        token_N = sample(logits_NV, rows)
        logprobs_N.copy_(logprobs_alone(logits_NV, token_N.clamp_min(0), rows.temperature_N))
        rows.counter_N.add_(1)
        return token_N

    expected = [(step().clone(), logprobs_N.clone()) for _ in range(3)]
    rows.counter_N.sub_(3)
    graph, token_N = captured(step)
    for tokens, logprobs in expected:
        graph.replay()
        assert torch.equal(token_N, tokens) and torch.equal(logprobs_N, logprobs)
    assert not torch.equal(expected[0][0], expected[1][0])


@pytest.mark.parametrize(
    ("vocab_size", "hidden_size"),
    [
        *product((V, 128_256), (896, 1024, 1536, 2048, 2560, 3584, 4096, 5120)),
        *((128_256, size) for size in (576, 2880, 4000)),  # no multiples of 128
    ],
)
def test_logits_have_the_same_bits_in_every_padding(vocab_size: int, hidden_size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_NE = torch.randn(LOGIT_ROWS[-1], hidden_size, generator=generator, device="cuda").bfloat16()
    weight_VE = (torch.randn(vocab_size, hidden_size, generator=generator, device="cuda") / 8).bfloat16()
    whole_NV = lm_head_logits(hidden_NE, weight_VE)
    for rows in (1, *LOGIT_ROWS, *(rows - 1 for rows in LOGIT_ROWS)):
        part = slice(hidden_NE.shape[0] - rows, None)
        assert torch.equal(lm_head_logits(hidden_NE[part], weight_VE), whole_NV[part]), f"{rows} rows"


@pytest.mark.parametrize("vocab_size", [V, 32_001])
def test_logprobs_have_the_same_bits_in_any_company_and_without_the_entropy(vocab_size: int) -> None:
    logits_NV = _logits(260, vocab_size)
    targets_N, temperature_N = torch.arange(260).cuda() * 100, torch.linspace(0.5, 2, 260).cuda()
    logprobs_N, entropy_N = logprobs_of(logits_NV, targets_N, temperature_N)
    log_p_NV = torch.log_softmax(logits_NV.double() / temperature_N[:, None], dim=-1)
    torch.testing.assert_close(logprobs_N.double(), log_p_NV.gather(1, targets_N[:, None])[:, 0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy_N.double(), -(log_p_NV.exp() * log_p_NV).sum(-1), rtol=1e-5, atol=1e-5)
    for part in (slice(0, 1), slice(3, 4), slice(5, 68), slice(0, 256)):
        given = (logits_NV[part], targets_N[part], temperature_N[part])
        some_n, some_entropy_n = logprobs_of(*given)
        assert torch.equal(some_n, logprobs_N[part]) and torch.equal(some_entropy_n, entropy_N[part])
        assert torch.equal(logprobs_alone(*given), logprobs_N[part])
