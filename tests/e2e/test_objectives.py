"""Every objective's recipe runs on a CPU, on the tiny model; and what only whole runs show: refills, and references
that move, through a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.run.loop import train
from octetrl.trainer import checkpoint
from tests.e2e.tiny_run import read_lines, recipe_tree, run, timeless, tiny_recipe
from tests.house.tree import REPO

pytestmark = pytest.mark.usefixtures("rewards_here")

ELSEWHERE = ("demo_rft", "demo_distill", "demo_ppo", "demo_grpo_lora", "demo_tools")  # in files of their own
RECIPES = sorted(
    path
    for path in (REPO / "recipes").glob("demo_*.yaml")
    if path.stem not in ELSEWHERE and load_recipe(path).algorithm.learns_from == "rollouts"
)


def tiny(path: Path, model: Path, output: Path, **changes: Any) -> Recipe:
    """The recipe of `path` on the tiny model, two prompts a step."""
    tree = recipe_tree(model, output, changes)
    several = [f"environments.{name}." for name in load_recipe(path).environments]
    words = [
        f"{key.replace('environment.', section)}={value}"
        for key, value in dotted(tree)
        if not key.startswith("algorithm.")
        for section in (several if several and key.startswith("environment.") else ["environment."])
    ]
    return load_recipe(path, [*words, "rollout.group_size=4", "rollout.prompts_per_step=2", "steps=1"])


def dotted(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_recipe_runs(path: Path, model: Path, tmp_path: Path) -> None:
    train(tiny(path, model, tmp_path / "run"))
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["grad_norm"] > 0 and "train/skipped" not in line
    assert 0 < line["correction/effective_sample_size"] <= 1
    assert line["mismatch/max_abs_diff"] == 0.0


def test_refills_draw_until_the_batch_is_full_or_the_cap_is_met(model: Path, tmp_path: Path) -> None:
    changes = {"algorithm.name": "dapo", "algorithm.max_refills": 3, "steps": 1}
    changes |= {"environment.reward": "tests.e2e.tiny_rewards:mostly_equal", "rollout.prompts_per_step": 4}
    (line,) = run(model, tmp_path / "run", changes)
    assert line["rollout/refills"] > 0 and line["rollout/groups"] > 4
    assert line["rollout/kept_groups"] >= 4 or line["rollout/refills"] == 3
    assert line["train/samples"] == 4 * line["rollout/kept_groups"]
    assert line["rollout/count"] == 4 * line["rollout/groups"]
    assert line["reward/penalty"] < 0  # some of its answers end at the limit
    changes = {"algorithm.name": "dapo", "algorithm.max_refills": 2, "steps": 1}
    (line,) = run(model, tmp_path / "equal", {**changes, "environment.reward": "tests.e2e.tiny_rewards:always_equal"})
    assert line["train/skipped"] == 1.0 and line["rollout/refills"] == 2 and line["rollout/groups"] == 6


MOVING = {
    "precision": "fp8",  # an FP8 cache is replayed to the policy alone, so that its reference would be a little off
    "algorithm.name": "dapo",
    "algorithm.kl_coefficient": 0.1,
    "algorithm.kl_target": 1e-4,
    "algorithm.reference_every": 2,
    "algorithm.entropy_coefficient": 0.01,
    "algorithm.max_refills": 2,
    "environment.reward": "tests.e2e.tiny_rewards:mostly_equal",
    "trainer.optimizer.lr": 3e-3,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 9,
    "steps": 5,
}


@pytest.fixture(scope="module")
def moving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(model, tmp_path_factory.mktemp("moving") / "run", MOVING)


def test_a_reference_that_follows(moving: list[dict[str, Any]]) -> None:
    kl = [line["kl"] for line in moving]
    assert kl[0] == 0.0 and kl[2] == 0.0 and kl[4] == 0.0, "it is the policy itself after every second update"
    assert kl[1] > 0 and kl[3] > 0
    scales = [line["kl/scale"] for line in moving]
    assert scales[:2] == pytest.approx([1.0, 0.98]), "a KL of 0 is too little"
    assert scales[2] > scales[1], "a KL above the target weighs more"


def test_a_moving_reference_survives_a_resume(moving: list[dict[str, Any]], model: Path, tmp_path: Path) -> None:
    stop = 3  # the reference has moved, and is no longer the policy
    run(model, tmp_path / "run", {**MOVING, "steps": stop})
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / f"step_{stop:06d}")
    assert "kl_scale" in saved.tensors("reference.safetensors")
    train(tiny_recipe(model, tmp_path / "run", MOVING), resume=True)
    assert timeless(read_lines(tmp_path / "run" / "metrics.jsonl")) == timeless(moving)


AS_TRL = {"algorithm.name": "rloo", "algorithm.rloo_ratio": "sequence", "algorithm.constant_length": 1}


@pytest.mark.parametrize(("kl_in", "objective"), [("reward", {}), ("reward_before_baseline", AS_TRL)])
def test_kl_in_the_reward_pulls_towards_the_reference(
    kl_in: str, objective: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    common = {"precision": "bf16", "trainer.optimizer.lr": 3e-3, "steps": 2} | objective
    changes = {"algorithm.kl_in": kl_in, "algorithm.kl_estimator": "k1", "algorithm.kl_coefficient": 1.0}
    lines, free = (run(model, tmp_path / name, common | more) for name, more in (("run", changes), ("free", {})))
    assert lines[0]["kl"] == 0.0 and lines[1]["kl"] != 0.0
    assert lines[0]["grad_norm"] == pytest.approx(free[0]["grad_norm"], rel=1e-5), "there is no KL yet"
    assert lines[1]["grad_norm"] != free[1]["grad_norm"]
