"""Shipped recipes are found by name, listed with a sentence each, copied whole, and part of a wheel."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.config.shipped import FOLDER, SCHEMA, copy_recipe, shipped_path, shipped_recipes
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


def test_a_wheel_contains_them() -> None:
    """What pyproject.toml says belongs to the package matches every file of the folder."""
    assert FOLDER.resolve() == REPO / "recipes"
    data = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in FOLDER.rglob("*.*"):
        package = ".".join(path.relative_to(REPO).parent.parts)
        assert any(fnmatch.fnmatch(path.name, pattern) for pattern in data[package]), path
    assert (REPO / "octetrl" / "py.typed").is_file()
    assert "py.typed" in data["octetrl"]
