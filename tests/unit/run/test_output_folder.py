"""The run folder: one live run at a time, one recipe for life, and no trace of a run that was refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from octetrl.config.errors import UserError
from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.run.output_folder import OutputFolder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(**changed: object) -> Recipe:
    sound = {"model": {"path": "m"}, "environment": {"dataset": "chain_sum"}, "output_dir": "runs/one"}
    return recipe_from_mapping(sound | changed)


def begin(given: Recipe, *, resume: bool = False) -> None:
    with OutputFolder(given, resume=resume) as folder:
        folder.keep()


def test_a_run_that_begins_leaves_its_recipe() -> None:
    begin(recipe())
    assert load_recipe("runs/one/config.yaml") == recipe()
    assert Path("runs/one/lock").read_text() == str(os.getpid())
    assert sorted(path.name for path in Path("runs/one").iterdir()) == ["config.yaml", "lock"]


def test_a_run_that_was_refused_leaves_nothing(here: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer"), OutputFolder(recipe(), resume=False) as folder:
        assert folder.path.is_dir()
        raise UserError("no tokenizer")
    assert list(here.iterdir()) == []


def test_a_refusal_keeps_the_folders_that_were_there(here: Path) -> None:
    Path("runs").mkdir()
    with pytest.raises(UserError), OutputFolder(recipe(), resume=False):
        raise UserError("refused")
    assert list(here.iterdir()) == [here / "runs"] and list(Path("runs").iterdir()) == []


def test_a_run_that_fails_after_it_began_stays() -> None:
    with pytest.raises(RuntimeError), OutputFolder(recipe(), resume=False) as folder:
        folder.keep()
        raise RuntimeError("a step failed")
    assert Path("runs/one/config.yaml").is_file()


def test_a_second_run_needs_resume_or_another_folder() -> None:
    begin(recipe())
    with pytest.raises(UserError, match="already holds a run; continue it with --resume"):
        OutputFolder(recipe(), resume=False)
    begin(recipe(), resume=True)


def test_resume_needs_a_run(here: Path) -> None:
    with pytest.raises(UserError, match="holds no run; leave --resume out"):
        OutputFolder(recipe(), resume=True)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "changed",
    [{"seed": 7}, {"rollout": {"group_size": 4}}, {"precision": "fp8"}, {"model": {"path": "other"}}],
    ids=lambda changed: next(iter(changed)),
)
def test_resume_with_another_recipe_is_refused_by_the_section(changed: dict[str, object]) -> None:
    begin(recipe())
    before = Path("runs/one/config.yaml").read_bytes()
    with pytest.raises(UserError, match=rf"another recipe \(different: .*{next(iter(changed))}"):
        OutputFolder(recipe(**changed), resume=True)
    assert Path("runs/one/config.yaml").read_bytes() == before


def test_resume_may_prolong_a_run_and_log_it_otherwise() -> None:
    begin(recipe())
    changed = {"steps": 500, "logging": {"console": "plain"}, "checkpoint": {"every": 3}, "evaluation": {"every": 2}}
    begin(recipe(**changed), resume=True)
    assert yaml.safe_load(Path("runs/one/config.yaml").read_text())["steps"] == 500


def test_resume_may_change_when_a_difference_ends_the_run() -> None:
    """Also that of a run whose config.yaml is from when the default was false."""
    for before, now in ((False, "auto"), ("auto", True), (True, False)):
        begin(recipe(mismatch={"fail_on_difference": before}), resume=Path("runs/one/config.yaml").exists())
        begin(recipe(mismatch={"fail_on_difference": now}), resume=True)
        assert yaml.safe_load(Path("runs/one/config.yaml").read_text())["mismatch"]["fail_on_difference"] == now


def test_two_live_runs_are_kept_apart_and_a_dead_ones_lock_is_free() -> None:
    with OutputFolder(recipe(), resume=False) as folder:
        folder.keep()
        with pytest.raises(UserError, match=rf"in use by a live run \(process {os.getpid()}\)"):
            OutputFolder(recipe(), resume=True)
    begin(recipe(), resume=True)


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    Path("runs").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="cannot write in 'runs/one'") as refusal:
        OutputFolder(recipe(), resume=False)
    assert "\n" not in str(refusal.value)
    assert Path("runs").read_text() == "a file where a folder should be"
