"""The race: its float32 kernels in Triton's interpreter against the float64 form, and both against the softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import octetrl.kernels.rows.sample_tokens as module
from octetrl.kernels.rows.sample_tokens import (
    CHUNK,
    greedy_tokens,
    sample_tokens,
    sample_tokens_reference,
    sample_tokens_triton,
)

BLOCK = CHUNK // 2


@pytest.fixture(autouse=True)
def larger_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time by the operation, not by the element."""
    monkeypatch.setattr(module, "ROWS", 16)
    monkeypatch.setattr(module, "BLOCK", BLOCK)


def _rows(num_rows: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys over the whole range of int64, counters, temperatures."""
    generator = torch.Generator().manual_seed(num_rows)
    key_N = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    return key_N, torch.arange(num_rows), torch.full((num_rows,), temperature)


def _logits(num_rows: int, vocab_size: int, spread: float) -> Tensor:
    return spread * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("vocab_size", [5, BLOCK, CHUNK + 1, 3 * CHUNK - 700])
@pytest.mark.parametrize("spread", [0.1, 3.0, 25.0])
def test_kernels_draw_the_tokens_of_the_reference(vocab_size: int, spread: float) -> None:
    logits_NV, rows = _logits(37, vocab_size, spread), _rows(37, 0.8)
    assert torch.equal(sample_tokens_triton(logits_NV, *rows), sample_tokens_reference(logits_NV, *rows))


def test_near_ties_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits throughout: nothing but the hash decides, in float32 as in float64."""
    monkeypatch.setattr(module, "ROWS", 512)
    logits_NV, rows = torch.full((2048, 3000), -60.0), _rows(2048)
    same_N = sample_tokens_triton(logits_NV, *rows) == sample_tokens_reference(logits_NV, *rows)
    assert same_N.sum() >= 2046


def test_the_time_of_the_race_is_right_over_its_whole_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry against another whose logit is moved until the race turns: the scores' difference, to 2e-5."""
    monkeypatch.setattr(module, "ROWS", 512)
    monkeypatch.setattr(module, "BLOCK", 2)
    monkeypatch.setattr(module, "CHUNK", 2)
    key_N, counter_N, temperature_N = _rows(2000)
    u_NV = module.uniform(key_N, counter_N, 2)
    turning_N = ((-u_NV[:, 1].log()).log() - (-u_NV[:, 0].log()).log()).float()
    usual_N = u_NV.min(dim=1).values > 2**-10  # below, u has the absolute accuracy of 1 - u
    for shift_N, winner in (
        (torch.where(usual_N, 2e-5, 1e-3), 1),
        (torch.where(usual_N, -2e-5, -1e-3), 0),
    ):
        logits_NV = torch.stack((torch.zeros(2000), turning_N + shift_N), dim=1)
        assert (sample_tokens_triton(logits_NV, key_N, counter_N, temperature_N) == winner).all()


def test_kernels_draw_in_proportion_to_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("ROWS", 2048), ("CHUNK", 8), ("BLOCK", 8)):
        monkeypatch.setattr(module, name, size)
    logits_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])
    num_draws = 4_000
    key_N, counter_N, temperature_N = _rows(num_draws, 0.7)
    tokens = sample_tokens_triton(logits_V.expand(num_draws, 8).contiguous(), key_N, counter_N, temperature_N)
    expected_V = (logits_V.double() / 0.7).softmax(0) * num_draws
    counts_V = torch.bincount(tokens, minlength=8)
    assert float(((counts_V - expected_V) ** 2 / expected_V).sum()) < 30  # 7 degrees of freedom: p = 1e-4


def test_greedy_rows_take_the_smaller_of_equal_ids_and_mix_with_drawn_ones() -> None:
    logits_NV, (key_N, counter_N, temperature_N) = _logits(8, CHUNK + 600, 2.0), _rows(8)
    highest = logits_NV.max() + 1
    temperature_N[::2] = 0
    logits_NV[0, [3, 3 + BLOCK, CHUNK + 5]] = highest  # one lane twice, and another chunk
    logits_NV[2, [BLOCK + 9, CHUNK + 9]] = highest
    logits_NV[4, CHUNK + 599] = highest
    tokens = sample_tokens_triton(logits_NV, key_N, counter_N, temperature_N)
    assert tokens[::2].tolist() == [3, BLOCK + 9, CHUNK + 599, int(logits_NV[6].argmax())]
    drawn = sample_tokens_reference(logits_NV, key_N, counter_N, torch.ones(8))
    assert torch.equal(tokens[1::2], drawn[1::2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draw", [sample_tokens_reference, sample_tokens_triton])
def test_rows_that_are_not_finite_give_minus_one(draw, bad: float, temperature: float) -> None:
    logits_NV = _logits(6, CHUNK + 100, 1.0)
    logits_NV[1, 17] = bad
    logits_NV[5, CHUNK + 99] = bad
    tokens = draw(logits_NV, *_rows(6, temperature))
    assert tokens[[1, 5]].tolist() == [-1, -1] and (tokens[[0, 2, 3, 4]] >= 0).all()


@pytest.mark.parametrize("draw", [sample_tokens_reference, sample_tokens_triton])
def test_a_row_draws_the_same_alone_and_in_company(draw) -> None:
    logits_NV, rows = _logits(11, 1000, 2.0), _rows(11)
    together = draw(logits_NV, *rows)
    for n in (0, 3, 10):
        assert torch.equal(draw(logits_NV[n : n + 1], *(row[n : n + 1] for row in rows)), together[n : n + 1])


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV, rows = _logits(10, 50, 1.0), _rows(10)
    whole = sample_tokens(logits_NV, *rows)
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 150)
    assert torch.equal(sample_tokens(logits_NV, *rows), whole)


def test_greedy_is_temperature_zero() -> None:
    logits_NV = _logits(5, 300, 1.0)
    logits_NV[2, 7] = math.nan
    assert torch.equal(greedy_tokens(logits_NV), sample_tokens(logits_NV, *_rows(5, 0.0)))
    assert sample_tokens(logits_NV[:0], *_rows(0)).shape == (0,)
