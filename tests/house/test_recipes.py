"""Every shipped recipe is sound as it stands and under each precision, and editors find its schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octetrl.config.load import PRECISIONS, dump_recipe, load_recipe
from octetrl.config.shipped import way_to_make
from octetrl.config.validate import validate_with_spec
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from tests.house.tree import REPO

RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
BASES = sorted((REPO / "recipes" / "bases").glob("*.yaml"))
PRESETS = ("tiny", "qwen3-0.6b", "qwen3-8b")


def name(path: Path) -> str:
    return path.stem


def test_there_are_recipes_for_the_demo_and_for_a_gpu() -> None:
    names = [path.stem for path in RECIPES]
    assert any(name.startswith("demo") for name in names)
    assert any("1gpu" in name for name in names)


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_it_validates_as_it_stands_and_survives_being_written(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe
    texts = " ".join(one.read_text().replace("\n# ", " ") for one in (*RECIPES, *BASES))
    for made in re.findall(r"(?:path|teacher|conversations): (runs/\S+)", dump_recipe(recipe)):
        commands = re.findall("`(.+?)`", way_to_make(made) or "")
        assert commands and all(command in texts for command in commands), f"{made}: made_first.py and the comment"


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_it_runs_under_every_precision_that_its_algorithm_allows(path: Path) -> None:
    has_rollouts = load_recipe(path).algorithm.learns_from == "rollouts"
    for precision in PRECISIONS:
        if has_rollouts or precision != "fp8_full":  # without rollouts no KV cache is calibrated
            assert load_recipe(path, [f"precision={precision}"]).precision == precision


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_it_fits_the_shape_in_its_name(path: Path) -> None:
    shape = next((preset for preset in PRESETS if preset in path.stem), "tiny")
    shape = "qwen3-0.6b" if path.stem.startswith("eval_") else shape  # long answers, of any model
    validate_with_spec(load_recipe(path), spec_from_config(preset_config(shape)))


def test_editors_find_its_schema() -> None:
    for path in (*RECIPES, *BASES):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        schema = first.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / schema).resolve() == REPO / "recipes" / "recipe.schema.json", f"{path}: {first}"


def test_a_gpu_recipes_name_tells_its_precision() -> None:
    for path in RECIPES:
        if "1gpu" in path.stem:
            assert path.stem.endswith(str(load_recipe(path).precision).replace("_", "-")), path
