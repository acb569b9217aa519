from __future__ import annotations

import pytest

from octetrl.config.schema import OptimizerConfig
from octetrl.trainer.schedule import learning_rate


def rates(decay: str, **changes: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay=decay, **changes)
    return [learning_rate(step, config, total_steps=6) for step in range(8)]


def test_constant() -> None:
    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1, 1]


def test_linear_to_the_minimum_and_no_further() -> None:
    assert rates("linear", min_lr_fraction=0.2) == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine() -> None:
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


def test_warm_up_longer_than_the_run() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, decay="cosine")
    assert learning_rate(4, config, total_steps=5) == 0.5 and learning_rate(10, config, total_steps=5) == 1.0
