from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from octetrl.config.schema import OptimizerConfig
from octetrl.run.build import build_run
from octetrl.run.loop import one_step
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.optimizer import learning_rate
from octetrl.trainer.packing import pack
from octetrl.trainer.streamed import StreamedCall
from tests.e2e.tiny_run import make_model, tiny_recipe
from tests.unit.trainer.test_critic import packed_pairs, pairs, tiny_reward_trainer
from tests.unit.trainer.tiny_trainer import random_samples, tiny_trainer


def rates(decay: str, **changes: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay=decay, **changes)
    return [learning_rate(step, config, total_steps=6) for step in range(8)]


def test_constant() -> None:
    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1, 1]


def test_the_last_step_has_the_minimum_and_later_ones_too() -> None:
    """Six steps, two of them warm-up: step 5 is the last."""
    assert rates("linear", min_lr_fraction=0.1) == pytest.approx([0.5, 1, 1, 0.7, 0.4, 0.1, 0.1, 0.1])
    cosine = [0.5, 1, 1, 0.775, 0.325, 0.1, 0.1, 0.1]  # 0.1 + 0.9 (1 + cos(pi k / 3)) / 2
    assert rates("cosine", min_lr_fraction=0.1) == pytest.approx(cosine)
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay="cosine", min_lr_fraction=0.1)
    assert [learning_rate(step, config, total_steps=3) for step in range(3)] == [0.5, 1, pytest.approx(0.1)]


def test_without_a_minimum_the_step_after_the_last_would_have_rate_0() -> None:
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0, 0], abs=1e-6)


def test_other_steps_change_the_curve_from_where_a_run_resumes() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=1, decay="linear", min_lr_fraction=0.25)
    found = [learning_rate(step, config, total_steps=3 if step < 3 else 6) for step in range(6)]
    assert found == pytest.approx([1, 1, 0.25, 0.625, 0.4375, 0.25])


def test_warm_up_longer_than_the_run() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, decay="cosine")
    assert learning_rate(4, config, total_steps=5) == 0.5 and learning_rate(10, config, total_steps=5) == 1.0
    floor = OptimizerConfig(lr=1.0, decay="linear", min_lr_fraction=0.5)
    assert learning_rate(0, floor, total_steps=1) == 1.0  # the first step is the last


DECAY = {"trainer.optimizer.decay": "linear", "trainer.optimizer.min_lr_fraction": 0.25}


def test_a_run_whose_first_steps_train_nothing_ends_at_the_minimum(tmp_path: Path) -> None:
    """PPO, six steps: the first two have nothing to learn from, and the third trains the critic alone."""
    changes = {
        "steps": 6,
        "precision": "bf16",
        "algorithm": {"name": "ppo"},
        "critic": {"pretrain_steps": 3, "optimizer": {"lr": 1e-3, "decay": "linear", "min_lr_fraction": 0.5}},
        "trainer.optimizer.lr": 1e-6,
    }
    run = build_run(tiny_recipe(make_model(tmp_path / "model"), tmp_path / "run", changes | DECAY))
    with closing(run):
        none = replace(run, algorithm=replace(run.algorithm, keeps=lambda group: False))
        lines = [one_step(none if step <= 2 else run, step).metrics for step in range(1, 7)]
    assert [line.get("train/skipped") for line in lines] == [1.0, 1.0, None, None, None, None]
    assert [line.get("lr") for line in lines] == [None, None, 0.0, *(pytest.approx(1e-6 * x) for x in (1, 0.625, 0.25))]
    assert [line.get("value/lr") for line in lines] == [None, None, *map(pytest.approx, (8e-4, 7e-4, 6e-4, 5e-4))]


def test_each_trainer_follows_the_step_of_its_batch() -> None:
    """Not the number of updates, which is 0: a policy's, a reward model's, and one whose batch arrives in parts."""
    optimizer = OptimizerConfig(lr=1.0, decay="linear", min_lr_fraction=0.1)
    trainer = tiny_trainer(optimizer=optimizer, total_steps=10)
    batch = replace(pack(random_samples(4), trainer.layout, "token"), step=10)
    streamed = StreamedCall(tiny_trainer(optimizer=optimizer, total_steps=10), 1.0)
    rewards = tiny_reward_trainer()
    rewards.config = rewards.config.model_copy(update={"optimizer": optimizer})
    found = [
        trainer.train(batch, KVReplay(), None),
        streamed.finish(batch, KVReplay(), None),
        rewards.train(replace(packed_pairs(pairs(4)), step=10)),
    ]
    assert [update.metrics["lr"] for update in found] == pytest.approx([0.1] * 3)
