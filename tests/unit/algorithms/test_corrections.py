from __future__ import annotations

import math

import pytest
import torch

from octetrl.algorithms.corrections import importance_correction

GENERATOR = torch.full((5,), -1.0)
TRAINER = GENERATOR + torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0]).log()


@pytest.mark.parametrize(
    ("mode", "weights", "clipped"),
    [
        ("none", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("tis", [0.25, 0.5, 1, 1.9, 1.9], [0, 0, 0, 1, 1]),
        ("mask", [0, 0, 1, 0, 0], [1, 1, 0, 1, 1]),
    ],
)
def test_weights(mode: str, weights: list[float], clipped: list[float]) -> None:
    correction = importance_correction(TRAINER, GENERATOR, mode, cap=1.9)
    torch.testing.assert_close(correction.weights_N, torch.tensor(weights, dtype=torch.float32))
    assert correction.clipped_N.tolist() == clipped


def test_no_gradient_through_the_weight() -> None:
    trainer = TRAINER.clone().requires_grad_()
    assert not importance_correction(trainer, GENERATOR, "tis", 2.0).weights_N.requires_grad


def test_uncapped_weights_undo_the_generator() -> None:
    """E over the generator of weight * f is E over the trainer of f, while no weight reaches the cap."""
    generator, trainer = torch.randn(9).log_softmax(0), torch.randn(9).log_softmax(0)
    weights = importance_correction(trainer, generator, "tis", cap=math.inf).weights_N
    f = torch.randn(9)
    torch.testing.assert_close((generator.exp() * weights * f).sum(), (trainer.exp() * f).sum())
