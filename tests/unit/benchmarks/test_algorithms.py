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
from octetrl.run import demo


def test_a_small_run_and_its_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(*given: Any) -> dict[str, Any]:
        tree = recipe_tree(*given)
        tree["rollout"] |= {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4}
        tree["environment"]["eval_size"] = 2
        return tree

    recipe_tree = algorithms.recipe_tree
    monkeypatch.setattr(algorithms, "recipe_tree", small)
    monkeypatch.setattr(demo, "NUM_EXAMPLES", 200)
    words = ["--steps", "1", "--sft-steps", "1", "--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]
    words += ["--pictures", str(tmp_path), "--objectives", "grpo"]
    algorithms.main([*words, "--seeds", "1"])
    first = json.loads((tmp_path / "algorithms_sums.json").read_text())
    monkeypatch.setattr(algorithms, "train", lambda recipe: pytest.fail("it ran again"))
    algorithms.main([*words, "--seeds", "1"])
    again = json.loads((tmp_path / "algorithms_sums.json").read_text())
    assert again["rows"] == first["rows"] and again["curves"] == first["curves"]
    (row,) = first["rows"]
    assert (row["precision"], row["workload"], row["steps"]) == ("bf16", "grpo, seed 0", 1)
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
def test_every_objective_is_a_sound_recipe(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def stop(recipe: object) -> None:
        assert recipe.algorithm.name == objective  # type: ignore[attr-defined]
        raise Reached

    monkeypatch.setattr(algorithms, "train", stop)
    with pytest.raises(Reached):
        algorithms.run_arm(tmp_path, argparse.Namespace(steps=8), objective, 0)
