"""PPO with a critic in whole runs: what it reports, pre-training, resuming to the bit, what is refused."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octetrl.config.load import load_recipe
from octetrl.models.families import load_spec
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from octetrl.trainer import checkpoint
from tests.e2e.tiny_run import make_model, read_lines, recipe_tree, run, timeless, tiny_recipe
from tests.house.tree import REPO

pytestmark = pytest.mark.usefixtures("rewards_here")

PPO: dict[str, Any] = {
    "algorithm.name": "ppo",
    "critic.optimizer.lr": 1e-3,
    "rollout.group_size": 1,
    "rollout.prompts_per_step": 8,
    "trainer.minibatches": 2,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 5,
    "steps": 4,
}
VALUES = {
    "value/loss", "value/mean", "value/return_mean", "value/clip_fraction", "value/grad_norm", "value/lr",
    "value/explained_variance",
}  # fmt: skip


def step_folder(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / f"step_{step:06d}"


@pytest.fixture(scope="module")
def pretrained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with KL in the reward whose first two steps train the critic alone."""
    folder = tmp_path_factory.mktemp("ppo") / "run"
    run(model, folder, PPO | {"critic.pretrain_steps": 2, "algorithm.kl_coefficient": 0.05})
    return folder


def test_every_step_says_how_good_the_critic_is(pretrained: Path) -> None:
    lines = read_lines(pretrained / "metrics.jsonl")
    assert all(line.keys() >= VALUES for line in lines)
    assert lines[0]["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # a head of zeros
    assert lines[-1]["value/loss"] < lines[0]["value/loss"]
    assert all("mismatch/max_abs_diff" in line for line in lines)


def test_the_policy_stands_still_until_the_critic_has_learnt(pretrained: Path) -> None:
    lines = read_lines(pretrained / "metrics.jsonl")
    assert [line["lr"] > 0 for line in lines] == ["loss" in line for line in lines] == [False, False, True, True]
    weights = [load_file(step_folder(pretrained, step) / "model.safetensors") for step in (1, 2, 3)]
    critics = [load_file(step_folder(pretrained, step) / "critic.safetensors") for step in (1, 2, 3)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    for earlier, later in itertools.pairwise(critics):
        assert not torch.equal(earlier["score.weight"], later["score.weight"])
    assert abs(lines[2]["kl"]) < 0.05


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_is_the_whole_run(pretrained: Path, model: Path, tmp_path: Path, step: int) -> None:
    shutil.copytree(pretrained, tmp_path / "run")
    for later in range(step + 1, 5):
        shutil.rmtree(step_folder(tmp_path / "run", later))
    changes = PPO | {"critic.pretrain_steps": 2, "algorithm.kl_coefficient": 0.05}
    train(tiny_recipe(model, tmp_path / "run", changes), resume=True)
    ours, theirs = (read_lines(folder / "metrics.jsonl") for folder in (tmp_path / "run", pretrained))
    assert timeless(ours) == timeless(theirs)
    saved = checkpoint.load(step_folder(tmp_path / "run", 4))
    assert {"critic.safetensors", "critic_optimizer.safetensors"} <= set(saved.files)
    for name in saved.files:
        assert (saved.folder / name).read_bytes() == (step_folder(pretrained, 4) / name).read_bytes(), name


def test_the_export_is_the_policy_alone(pretrained: Path, tmp_path: Path) -> None:
    target = export_run(str(pretrained), str(tmp_path / "exported"))
    assert not [file.name for file in target.iterdir() if "critic" in file.name or "optimizer" in file.name]
    assert load_spec(target).num_layers == 1


@pytest.mark.parametrize("precision", ["bf16", "fp8_rollout", "fp8"])
def test_it_runs_under_every_precision(precision: str, model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", PPO | {"precision": precision, "steps": 2, "checkpoint.every": 0})
    assert all(line["mismatch/unequal_tokens"] == 0 for line in lines if precision != "fp8_rollout")
    assert lines[1]["value/explained_variance"] != 0


def test_one_update_a_batch_is_on_policy(model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", PPO | {"trainer.minibatches": 1, "steps": 2})
    assert all(line["ratio/clip_fraction"] == 0 and line["value/clip_fraction"] == 0 for line in lines)


def test_a_critic_of_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", vocab_size=512)
    with pytest.raises(UserError, match=r"critic\.path: .* has a vocabulary of 512, the policy's is 320"):
        train(tiny_recipe(model, tmp_path / "run", PPO | {"critic.path": str(other)}))
    larger = make_model(tmp_path / "larger", num_hidden_layers=2)
    lines = run(model, tmp_path / "run", PPO | {"critic.path": str(larger), "steps": 1})
    assert lines[0]["value/grad_norm"] > 0


def test_the_recipe_runs(model: Path, tmp_path: Path) -> None:
    changes = PPO | {"environment.reward": "tests.e2e.tiny_rewards:by_text", "critic.pretrain_steps": 1, "steps": 3}
    of_the_recipe = ("algorithm.", "trainer.", "critic.optimizer", "rollout.group_size", "precision")
    words = dotted(recipe_tree(model, tmp_path / "run", changes))
    train(load_recipe(REPO / "recipes/demo_ppo.yaml", [word for word in words if not word.startswith(of_the_recipe)]))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["lr"] > 0 for line in lines] == [False, True, True]
    assert all(line["mismatch/max_abs_diff"] == 0.0 and line["train/updates"] == 4 for line in lines)


def dotted(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in tree.items():
        found += dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={value}"]
    return found
