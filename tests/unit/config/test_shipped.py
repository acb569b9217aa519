"""Shipped recipes are found by name, listed with a sentence each, and copied whole."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.config.schema import Preset
from octetrl.config.shipped import SCHEMA, copy_recipe, shipped_path, shipped_recipes
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import PRESETS, preset_config
from octetrl.system.errors import UserError

REPO = Path(__file__).parents[3]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_bare_name_is_the_shipped_recipe_unless_there_is_such_a_file(tmp_path: Path) -> None:
    assert load_recipe("demo_grpo") == load_recipe(REPO / "recipes" / "demo_grpo.yaml")
    (tmp_path / "demo_grpo").write_text("model: {path: mine}\nenvironment: {dataset: chain_sum}\n")
    assert load_recipe("demo_grpo").model.path == "mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("demo_grop", "demo_grop: no such file, and no shipped recipe has this name .*did you mean 'demo_grpo'"),
        ("demo_grpo.yaml", "demo_grpo.yaml: no such file"),
        ("recipes/demo_grpo", "recipes/demo_grpo: no such file"),
    ],
)
def test_what_is_neither_is_refused(given: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe(given)


def test_a_copy_means_the_same_and_never_overwrites(tmp_path: Path) -> None:
    files = copy_recipe("demo_ppo", tmp_path / "mine")
    assert [str(path.relative_to(tmp_path / "mine")) for path in files] == [
        "demo_ppo.yaml", "bases/demo_rl.yaml", "bases/demo_sums.yaml", SCHEMA,
    ]  # fmt: skip
    assert load_recipe(files[0]) == load_recipe("demo_ppo")
    assert copy_recipe("demo_ppo", tmp_path / "mine") == files, "the same content again is no loss"
    files[2].write_text("# changed\n" + files[2].read_text())
    with pytest.raises(UserError, match=r"demo_sums.yaml' exists with other content"):
        copy_recipe("demo_grpo", tmp_path / "mine")
    assert not (tmp_path / "mine" / "demo_grpo.yaml").exists()


def test_the_verb_lists_and_copies(tmp_path: Path, capsys: Capture) -> None:
    assert run_command(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in (REPO / "recipes").glob("*.yaml"))
    assert run_command(["recipes", "--copy", "demo_grpo", "--to", "here"]) == 0
    assert (tmp_path / "here" / "demo_grpo.yaml").is_file()
    assert run_command(["recipes", "--to", "here"]) == 2
    assert "--copy" in capsys.readouterr().err


@pytest.mark.parametrize("name", shipped_recipes())
def test_each_says_in_a_sentence_what_it_does(name: str) -> None:
    assert 10 < len(shipped_recipes()[name]) < 180, shipped_path(name)


@pytest.mark.parametrize(
    ("name", "parameters", "tied"),
    [
        ("tiny", 1_033_600, True),
        ("qwen3-0.6b", 596_049_920, True),
        ("qwen3-1.7b", 1_720_574_976, True),
        ("qwen3-8b", 8_190_735_360, False),
        ("qwen3-14b", 14_768_307_200, False),
        ("qwen3-32b", 32_762_123_264, False),
        ("llama-3.1-8b", 8_030_261_248, False),
        ("llama-3.1-70b", 70_553_706_496, False),
    ],
)
def test_shapes_have_the_published_number_of_parameters(name: str, parameters: int, tied: bool) -> None:
    spec = spec_from_config(preset_config(name))
    assert spec.num_parameters == parameters
    assert (spec.tied_embeddings, spec.qk_norm) == (tied, not name.startswith("llama"))


def test_a_recipe_may_name_every_preset() -> None:
    assert set(get_args(Preset)) == set(PRESETS)
    with pytest.raises(UserError, match="did you mean 'qwen3-8b'"):
        preset_config("qwen3-8")
