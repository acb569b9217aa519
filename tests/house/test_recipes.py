"""Every shipped recipe is sound as it stands and under each precision, and editors find its schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octetrl.config.load import PRECISIONS, dump_recipe, load_recipe
from octetrl.config.shipped import way_to_make
from octetrl.config.validate import validate_with_spec
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import PRESETS as SHAPES
from octetrl.shapes.presets import preset_config
from tests.house.tree import REPO

RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
BASES = sorted((REPO / "recipes" / "bases").glob("*.yaml"))
PRESETS = tuple(sorted(SHAPES, key=len, reverse=True))  # the longest name first


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_it_is_sound_as_written_under_every_precision_and_with_the_shape_in_its_name(
    path: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(path)
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe
    for precision in PRECISIONS:
        if precision == "mxfp8" and recipe.cluster.num_workers > 1:
            continue
        if recipe.algorithm.learns_from == "rollouts" or precision != "fp8_full":  # else no KV cache is calibrated
            assert load_recipe(path, [f"precision={precision}"]).precision == precision
    shape = next((preset for preset in PRESETS if preset in path.stem), "tiny")
    shape = "qwen3-0.6b" if path.stem.startswith("eval_") else shape  # long answers, of any model
    validate_with_spec(recipe, spec_from_config(preset_config(shape)))


def test_what_a_recipe_expects_from_an_earlier_run_says_how_to_make_it() -> None:
    assert any(path.stem.startswith("demo") for path in RECIPES) and any("1gpu" in path.stem for path in RECIPES)
    texts = " ".join(one.read_text().replace("\n# ", " ") for one in (*RECIPES, *BASES))
    for path in RECIPES:
        for made in re.findall(r"(?:path|teacher|conversations): (runs/\S+)", dump_recipe(load_recipe(path))):
            commands = re.findall("`(.+?)`", way_to_make(made) or "")
            assert commands and all(command in texts for command in commands), f"{made}: way_to_make and the comment"


def test_editors_find_its_schema() -> None:
    for path in (*RECIPES, *BASES):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        schema = first.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / schema).resolve() == REPO / "recipes" / "recipe.schema.json", f"{path}: {first}"


def test_a_gpu_recipes_name_tells_its_precision() -> None:
    for path in RECIPES:
        if "1gpu" in path.stem:
            assert path.stem.endswith(str(load_recipe(path).precision).replace("_", "-")), path
