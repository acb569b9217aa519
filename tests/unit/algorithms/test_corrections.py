"""Corrections by hand and against products and means worked out in Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.corrections import Correction, correct, effective_sample_size
from tests.objectives import objective

LENGTHS = (3, 2, 1, 4)
SEQUENCE = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
RATIOS = [[1.0, 2.0, 3.0], [0.5, 0.25], [8.0], [1.0, 1.1, 0.9, 1.0]]
GENERATOR = torch.full((10,), -3.0, dtype=torch.float64)
TRAINER = GENERATOR + torch.tensor([k for row in RATIOS for k in row], dtype=torch.float64).log()


def corrected(*names: str, **caps: object) -> Correction:
    config = objective(corrections=names, **caps)
    return correct(TRAINER, GENERATOR, SEQUENCE, 4, config)


def rows(values: Tensor) -> list[list[float]]:
    return [part.tolist() for part in values.split(LENGTHS)]


def each(numbers: list[float]) -> list[list[float]]:
    return [[number] * length for number, length in zip(numbers, LENGTHS, strict=True)]


def assert_rows(values: Tensor, expected: list[list[float]]) -> None:
    assert [pytest.approx(row) for row in expected] == rows(values)


def test_none() -> None:
    assert_rows(corrected().weights_N, each([1, 1, 1, 1]))
    assert corrected().metrics["correction/clip_fraction"].sum() == 0


def test_token_by_token() -> None:
    tis = corrected("tis", tis_cap=1.9)
    assert_rows(tis.weights_N, [[1, 1.9, 1.9], [0.5, 0.25], [1.9], [1, 1.1, 0.9, 1]])
    assert_rows(tis.metrics["correction/tis_fraction"], [[0, 1, 1], [0, 0], [1], [0, 0, 0, 0]])
    mask = corrected("token_mask", token_mask_range=(0.4, 2.5))
    assert_rows(mask.weights_N, [[1, 1, 0], [1, 0], [0], [1, 1, 1, 1]])


def test_icepop_is_tis_and_a_mask_as_wide() -> None:
    """k inside the range, 0 outside it."""
    icepop = corrected("tis", "token_mask", tis_cap=5.0, token_mask_range=(0.4, 5.0))
    assert_rows(icepop.weights_N, [[k if 0.4 <= k <= 5.0 else 0.0 for k in row] for row in RATIOS])


def test_by_whole_samples() -> None:
    products = [math.prod(row) for row in RATIOS]
    means = [product ** (1 / len(row)) for product, row in zip(products, RATIOS, strict=True)]
    assert_rows(corrected("sequence_tis", sequence_tis_cap=7.0).weights_N, each([min(k, 7.0) for k in products]))
    masked = corrected("sequence_mask", sequence_mask_range=(0.5, 7.0))
    assert_rows(masked.weights_N, each([float(0.5 <= k <= 7.0) for k in products]))
    geometric = corrected("geometric_mask", geometric_mask_range=(0.9, 1.9))
    assert_rows(geometric.weights_N, each([float(0.9 <= k <= 1.9) for k in means]))
    assert_rows(geometric.metrics["correction/geometric_mask_fraction"], each([0, 1, 1, 0]))


def test_mis_is_a_sequence_weight_and_a_mask_as_wide() -> None:
    mis = corrected("sequence_tis", "sequence_mask", sequence_tis_cap=7.0, sequence_mask_range=(0.0, 7.0))
    assert_rows(mis.weights_N, each([k if k <= 7.0 else 0.0 for k in (math.prod(row) for row in RATIOS)]))


def test_veto_leaves_out_whole_samples() -> None:
    floor = 0.3 * math.exp(-3.0)  # the trainer's 0.25 * exp(-3) is below it
    vetoed = corrected("tis", "veto", veto_floor=floor, tis_cap=9.0)
    assert_rows(vetoed.weights_N, [RATIOS[0], [0, 0], RATIOS[2], RATIOS[3]])
    assert_rows(vetoed.metrics["correction/veto_fraction"], each([0, 1, 0, 0]))


def test_one_upon_the_other_and_each_counted() -> None:
    both = corrected("tis", "geometric_mask", "veto", tis_cap=1.05, geometric_mask_range=(0.9, 1.9))
    assert_rows(both.weights_N, [[1, 1.05, 1.05], [0, 0], [0], [1, 1.05, 0.9, 1]])
    assert_rows(both.metrics["correction/clip_fraction"], [[0, 1, 1], [1, 1], [1], [0, 1, 0, 0]])


def test_no_gradient_through_the_weight() -> None:
    trainer = TRAINER.clone().requires_grad_()
    assert not correct(trainer, GENERATOR, SEQUENCE, 4, objective()).weights_N.requires_grad


@pytest.mark.parametrize("names", [("tis",), ("sequence_tis",)])
def test_uncapped_weights_undo_the_generator(names: tuple[str, ...]) -> None:
    """E over the generator of weight * f is E over the trainer of f, while no weight reaches the cap."""
    generator, trainer = torch.randn(9).log_softmax(0), torch.randn(9).log_softmax(0)
    config = objective(corrections=names, tis_cap=math.inf, sequence_tis_cap=math.inf)
    weights = correct(trainer, generator, torch.arange(9), 9, config).weights_N
    f = torch.randn(9)
    torch.testing.assert_close((generator.exp() * weights * f).sum(), (trainer.exp() * f).sum())


def test_a_sample_is_corrected_alike_in_any_company() -> None:
    config = objective(corrections=("sequence_tis", "sequence_mask", "geometric_mask", "veto"))
    together = correct(TRAINER, GENERATOR, SEQUENCE, 4, config).weights_N.split(LENGTHS)
    for part, trainer, generator in zip(together, TRAINER.split(LENGTHS), GENERATOR.split(LENGTHS), strict=True):
        alone = correct(trainer, generator, torch.zeros(len(part), dtype=torch.int64), 1, config)
        assert torch.equal(alone.weights_N, part)


def test_effective_sample_size() -> None:
    weights = torch.tensor([1.0, 1.0, 2.0, 0.0])
    metrics = {"correction/mean_weight": 1.0, "correction/mean_square_weight": float(weights.square().mean())}
    found = effective_sample_size(metrics)["correction/effective_sample_size"]
    assert found == pytest.approx(float(weights.sum() ** 2 / (4 * weights.square().sum())))
    assert effective_sample_size({"loss": 1.0}) == {}
