"""Sampling: against the distribution, against a plain reference of the filters, and alone as in company."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octetrl.engine.sampler import SamplingRows, _kept, sample, sequence_key
from octetrl.kernels.rows.sample_tokens import uniform

LOGITS_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])


def rows_of(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """Row n is sibling 0 of the request with seed n, at its first token."""
    return SamplingRows(
        key_N=torch.tensor([sequence_key(seed, 0) for seed in range(num_rows)]),
        counter_N=torch.zeros(num_rows, dtype=torch.int64),
        temperature_N=torch.full((num_rows,), temperature),
        top_k_N=torch.full((num_rows,), top_k),
        top_p_N=torch.full((num_rows,), top_p),
        min_p_N=torch.full((num_rows,), min_p),
        draws=temperature > 0,
        filters=(top_k, top_p, min_p) != (0, 1.0, 0.0),
    )


def chi_square(tokens: Tensor, probability_V: Tensor) -> float:
    """Pearson's statistic over the entries that can be drawn; nothing else may have been drawn."""
    counts_V = torch.bincount(tokens, minlength=len(probability_V)).double()
    possible_V = probability_V > 0
    assert counts_V[~possible_V].sum() == 0
    expected_V = probability_V[possible_V] * len(tokens)
    return float(((counts_V[possible_V] - expected_V) ** 2 / expected_V).sum())


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"top_k": 3}, [0, 7, 1]),
        ({"top_p": 0.6}, [0, 7]),
        ({"min_p": 0.2}, [0, 7, 1, 2]),
        ({"top_k": 4, "top_p": 0.7, "min_p": 0.1}, [0, 7]),
    ],
)
def test_draws_follow_the_distribution(sampling: dict[str, float], kept: list[int]) -> None:
    num_draws = 8_000
    probability_V = torch.zeros(8, dtype=torch.float64)
    probability_V[kept] = (LOGITS_V[kept].double() / sampling.get("temperature", 1.0)).softmax(0)
    tokens = sample(LOGITS_V.expand(num_draws, 8).contiguous(), rows_of(num_draws, **sampling))  # type: ignore[arg-type]
    assert chi_square(tokens, probability_V) < 30  # 7 degrees of freedom: p = 1e-4


def test_the_draws_of_one_sequence_and_of_its_siblings_follow_the_distribution() -> None:
    """Seeds differ above; here the counter does, then the sibling."""
    probability_V = LOGITS_V.double().softmax(0)
    for keys, counters in (
        ([sequence_key(3, 5)] * 5_000, range(5_000)),
        ([sequence_key(3, s) for s in range(5_000)], [4] * 5_000),
    ):
        rows = rows_of(5_000)
        rows.key_N[:], rows.counter_N[:] = torch.tensor(keys), torch.tensor(list(counters))
        assert chi_square(sample(LOGITS_V.expand(5_000, 8).contiguous(), rows), probability_V) < 30


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    u_NV = uniform(torch.tensor([sequence_key(seed, 0) for seed in range(64)]), torch.arange(64), 1000)
    assert u_NV.min() > 0 and u_NV.max() < 1
    counts = torch.histc(u_NV, bins=20, min=0, max=1)
    assert float(((counts - 3200) ** 2 / 3200).sum()) < 50
    centred_NV = u_NV - 0.5
    for left, right in (
        (centred_NV[:-1], centred_NV[1:]),
        (centred_NV[:, :-1], centred_NV[:, 1:]),
        (centred_NV[:, :-64], centred_NV[:, 64:]),
    ):
        correlation = float((left * right).mean() * 12)
        assert abs(correlation) < 5 / math.sqrt(left.numel())


def test_the_numbers_are_pinned() -> None:
    """A change of the hash changes every run: say so in lab/log.md."""
    assert sequence_key(0, 0) == -2152535657050944081
    u_V = uniform(torch.tensor([sequence_key(17, 2)]), torch.tensor([5]), 3)[0]
    assert u_V.tolist() == pytest.approx([0.7009664385086322, 0.11350212695861062, 0.5490590701376482], abs=0)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1, 2**70 + 5])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert torch.tensor(sequence_key(seed, 3)).dtype == torch.int64


def test_a_row_draws_the_same_alone_and_in_company() -> None:
    torch.manual_seed(0)
    logits_NV = torch.randn(37, 203) * 3
    rows = rows_of(37, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)
    together = sample(logits_NV, rows)
    for n in (0, 11, 36):
        one = slice(n, n + 1)
        alone = SamplingRows(
            rows.key_N[one], rows.counter_N[one], rows.temperature_N[one], rows.top_k_N[one], rows.top_p_N[one],
            rows.min_p_N[one], draws=True, filters=True,
        )  # fmt: skip
        assert torch.equal(sample(logits_NV[one], alone), together[one])


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV = torch.randn(10, 50)
    whole = sample(logits_NV, rows_of(10, top_p=0.8))
    monkeypatch.setattr("octetrl.kernels.rows.sample_tokens.SLICE_ELEMENTS", 150)
    assert torch.equal(sample(logits_NV, rows_of(10, top_p=0.8)), whole)


def plain_filter(probability: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    ranked = sorted(range(len(probability)), key=lambda v: (-probability[v], v))
    ranked = ranked[: top_k or None]
    total, reached, kept = sum(probability[v] for v in ranked), 0.0, []
    for v in ranked:
        if reached >= top_p * total and top_p < 1:
            break
        kept.append(v)
        reached += probability[v]
    return {v for v in kept if probability[v] >= min_p * probability[ranked[0]]}


@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filters_equal_a_plain_reference(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(1)
    logits_NV = torch.randn(20, 60).mul(2).round(decimals=1)  # rounded: there are ties
    weight_NV = (logits_NV - logits_NV.amax(1, keepdim=True)).double().exp()
    limits = (torch.full((20,), top_k), torch.full((20,), top_p), torch.full((20,), min_p))
    kept_NV = _kept(weight_NV, *limits)
    p, q = float(limits[1][0]), float(limits[2][0])  # as float32 holds them
    for weight_V, kept_V in zip(weight_NV, kept_NV, strict=True):
        assert set(kept_V.nonzero()[:, 0].tolist()) == plain_filter(weight_V.tolist(), top_k, p, q)


def test_greedy_and_drawn_rows_mix() -> None:
    logits_NV = torch.randn(6, 50)
    rows = rows_of(6)
    rows.temperature_N[::2] = 0
    tokens = sample(logits_NV, rows)
    assert torch.equal(tokens[::2], logits_NV[::2].argmax(1))
    assert torch.equal(tokens[1::2], sample(logits_NV, rows_of(6))[1::2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_never_sampled(bad: float, temperature: float) -> None:
    logits_NV = torch.randn(3, 50)
    logits_NV[1, 17] = bad
    tokens = sample(logits_NV, rows_of(3, temperature))
    assert tokens[1] == -1 and tokens[0] >= 0 and tokens[2] >= 0
