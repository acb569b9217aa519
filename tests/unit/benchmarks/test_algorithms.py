"""The benchmark of objectives, small: what it leaves behind, and that it takes up what ended."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import algorithms
from benchmarks.curves import panels
from octetrl.config.environment import EnvironmentConfig
from octetrl.config.schema import Recipe
from octetrl.run import demo
from tests.e2e import tiny_run

SUMS = EnvironmentConfig(**tiny_run.RECIPE["environment"] | {"eval_size": 2})


def test_a_small_run_and_its_continuation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> list[str]:
        sizes = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4"]
        return [*quietly(), *sizes, "environment.eval_size=2", "mismatch.fail_above=null"]

    def of_a_file(*arguments: Any) -> Recipe:
        """The cold start's sums are reasoning_gym's; a process that imports it costs more than a run."""
        return recipe_of(*arguments).model_copy(update={"environment": SUMS})

    quietly, recipe_of = algorithms.quietly, algorithms.recipe_of
    monkeypatch.setattr(algorithms, "quietly", small)
    monkeypatch.setattr(algorithms, "recipe_of", of_a_file)
    monkeypatch.setattr(demo, "NUM_EXAMPLES", 200)
    monkeypatch.setattr(algorithms, "NUM_PAIRS", 4)
    words = ["--steps", "1", "--sft-steps", "1", "--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]
    words += ["--pictures", str(tmp_path), "--objectives", "grpo"]
    algorithms.main([*words, "--seeds", "1"])
    first = json.loads((tmp_path / "algorithms_sums.json").read_text())
    monkeypatch.setattr(algorithms, "train", lambda recipe: pytest.fail("it ran again"))
    algorithms.main([*words, "--seeds", "1"])
    again = json.loads((tmp_path / "algorithms_sums.json").read_text())
    assert again["rows"] == first["rows"] and again["curves"] == first["curves"]
    (row,) = first["rows"]
    assert (row["precision"], row["workload"], row["steps"]) == ("fp8_full", "grpo, seed 0", 1)
    assert row["mismatch/max_abs_diff"] == 0.0
    assert len(first["curves"]) == 1
    algorithms.main([*words, "--render"])
    ElementTree.parse(tmp_path / "algorithms.svg")


def test_panels() -> None:
    curve = [(1.0, 0.2), (2.0, 0.4), (3.0, 1.0)]
    drawn = panels({"a & b": [curve, curve], "c": [curve]}, x="step", y="reward")
    root = ElementTree.fromstring(drawn)
    lines = [element.get("points", "") for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 5 and lines[0] == lines[2], "two seeds and their mean; one seed and its mean"
    assert "a &amp; b" in drawn


@pytest.mark.parametrize("objective", algorithms.OBJECTIVES)
def test_every_objective_has_a_recipe(objective: str, tmp_path: Path) -> None:
    recipe = algorithms.recipe_of(objective, 2, tmp_path, argparse.Namespace(steps=8, jobs=2))
    assert (recipe.algorithm.name, recipe.seed, recipe.steps) == (recipe_name(objective), 2, 8)
    assert recipe.model.path == str(tmp_path / "start") and recipe.cluster.cpu_threads == 1


def recipe_name(objective: str) -> str:
    return "grpo" if objective == "dr_grpo" else objective
