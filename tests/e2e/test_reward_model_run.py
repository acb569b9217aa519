"""A reward model in whole runs, trained whole or as adapters with a head: on pairs, resumed, exported, and then scoring
another run's rollouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from examples.preference_pairs import write_pairs
from octetrl.config.errors import UserError
from octetrl.config.load import load_recipe
from octetrl.models.families import load_spec
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.trainer import checkpoint
from tests.e2e.tiny_run import read_lines, run, timeless, tiny_recipe
from tests.house.tree import REPO

STEPS = 12
LORA: dict[str, Any] = {"model.lora": {"rank": 4, "alpha": 16.0}, "trainer.optimizer.lr": 1e-2}


@pytest.fixture(scope="module", params=[{}, LORA], ids=["whole", "lora"])
def changes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe without an environment, and pairs whose better answer is the longer one."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f"{n + 1} 1 1 1", "rejected": f"{n + 1}"} for n in range(40)]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return {
        "precision": "fp8",
        "algorithm": {"name": "reward_model", "conversations": str(file), "batch_size": 8},
        "environment": {},
        "trainer.minibatches": 2,
        "trainer.optimizer.lr": 1e-3,
        "checkpoint.every": 4,
        "checkpoint.keep_last": 9,
        "steps": STEPS,
        **request.param,
    }


@pytest.fixture(scope="module")
def trained(model: Path, changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "run"
    run(model, folder, changes)
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(str(trained), str(tmp_path_factory.mktemp("exported") / "reward_model"))


def test_it_learns_which_answer_is_better(trained: Path) -> None:
    lines = read_lines(trained / "metrics.jsonl")
    assert lines[0]["preference/accuracy"] < 1.0 and lines[-1]["preference/accuracy"] == 1.0
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"] and lines[-1]["preference/margin"] > 0.5
    assert all(line["train/pairs"] == 8 and line["train/updates"] == 2 for line in lines)
    assert not any(name.startswith(("reward/", "rollout/", "mismatch/")) for line in lines for name in line)


def test_a_resumed_run_is_the_whole_run(trained: Path, model: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    for step in (8, STEPS):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    train(tiny_recipe(model, tmp_path / "run", changes), resume=True)
    ours, theirs = (folder / "metrics.jsonl" for folder in (tmp_path / "run", trained))
    assert timeless(read_lines(ours)) == timeless(read_lines(theirs))
    last = f"checkpoints/step_{STEPS:06d}"
    for name in checkpoint.load(tmp_path / "run" / last).files:
        assert (tmp_path / "run" / last / name).read_bytes() == (trained / last / name).read_bytes(), name


def test_the_export_is_a_classifier_of_one_label(exported: Path) -> None:
    theirs = AutoModelForSequenceClassification.from_pretrained(exported)
    assert theirs.config.num_labels == 1 and theirs.score.weight.shape == (1, 64)
    assert not list(exported.glob("optimizer*"))
    with pytest.raises(UserError, match="unsupported architecture Qwen3ForSequenceClassification"):
        load_spec(exported)


def test_training_goes_on_from_a_reward_model(exported: Path, changes: dict[str, Any], tmp_path: Path) -> None:
    line = run(exported, tmp_path / "run", changes | {"steps": 1})[0]
    assert line["preference/accuracy"] == 1.0


def test_it_scores_the_rollouts_of_another_run(exported: Path, model: Path, tmp_path: Path) -> None:
    scored = {"environment.reward": None, "environment.reward_model": str(exported), "precision": "fp8"}
    lines = run(model, tmp_path / "run", scored | {"evaluation.every": 2})
    assert all(line["reward/count"] == 8 and line["reward/std"] > 0 and "loss" in line for line in lines)
    assert "eval/accuracy" in lines[1]
    report = evaluate_checkpoint(str(tmp_path / "run"), tiny_recipe(model, tmp_path / "other", scored))
    assert report.accuracy is not None


def test_a_critic_may_begin_with_it(exported: Path, model: Path, tmp_path: Path) -> None:
    line = run(model, tmp_path / "run", {"algorithm.name": "ppo", "critic.path": str(exported), "steps": 1})[0]
    assert line["value/mean"] != 0.0  # its head is the reward model's


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"environment.reward_model": "x"}, "'x' and environment.reward .* exclude each other"),
        ({"critic.pretrain_steps": 2}, "critic: grpo has no critic"),
        ({"algorithm.name": "ppo", "critic.pretrain_steps": 3}, "critic.pretrain_steps: 3 of 3 steps leave none"),
        ({"algorithm.name": "ppo", "critic.optimizer.betas": [0.9, 1.0]}, r"critic\.optimizer\.betas: \[0.9, 1.0\]"),
        ({"algorithm": {"name": "reward_model"}}, "reward_model needs the path of a file"),
    ],
)
def test_what_cannot_stand_together_is_refused(change: dict[str, Any], said: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        tiny_recipe(model, tmp_path / "run", change)


def test_the_recipe_runs_on_the_examples_pairs(model: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    write_pairs(pairs, 40)
    overrides = {"model.path": model, "algorithm.conversations": pairs, "output_dir": tmp_path / "run"}
    words = [f"{name}={value}" for name, value in overrides.items()]
    words += ["steps=2", "model.context_length=512", "logging.console=quiet", "cluster.device=cpu"]
    train(load_recipe(REPO / "recipes/demo_reward_model.yaml", words))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["train/pairs"] for line in lines] == [32, 32] and lines[1]["preference/accuracy"] > 0
