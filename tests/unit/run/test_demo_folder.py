"""The demo removes what an earlier demo wrote, and nothing of anybody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.config.load import dump_recipe
from octetrl.run import demo
from octetrl.run.demo import COLD_START, FINISHED, MADE, MARKER, note_phase, prepare_folder
from octetrl.run.folder.output_folder import OutputFolder
from octetrl.system.errors import Terminated, UserError
from octetrl.system.files import folder_lock
from tests.e2e.tiny_run import tiny_recipe

SAVED = ("sft/checkpoints/step_000007", "grpo/checkpoints/step_000001", "grpo/checkpoints/step_000002")


def test_a_second_demo_replaces_what_the_first_wrote_and_leaves_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    prepare_folder(folder)
    for name in ("sft/checkpoints", "ppo"):
        (folder / name).mkdir(parents=True)
    (folder / "worked_examples.jsonl").touch()
    prepare_folder(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([MARKER, "ppo"])


def test_an_unfinished_demo_is_continued(tmp_path: Path) -> None:
    assert prepare_folder(tmp_path) == []
    (tmp_path / "model").mkdir()
    assert prepare_folder(tmp_path) == [] and not (tmp_path / "model").exists(), "half a model is no model"
    (tmp_path / "model").mkdir()
    note_phase(tmp_path, MADE)
    assert prepare_folder(tmp_path) == [MADE] and (tmp_path / "model").exists()
    note_phase(tmp_path, COLD_START)
    assert prepare_folder(tmp_path) == [MADE, COLD_START]
    assert prepare_folder(tmp_path, again=True) == [] and not (tmp_path / "model").exists()
    note_phase(tmp_path, MADE)
    note_phase(tmp_path, FINISHED)
    (tmp_path / "model").mkdir()
    assert prepare_folder(tmp_path) == [] and not (tmp_path / "model").exists(), "a finished one is replaced"


def test_what_no_demo_wrote_or_a_run_of_another_model_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(UserError, match=f"holds model, and no demo is known to have written that.*{MARKER}"):
        prepare_folder(tmp_path)
    assert (tmp_path / "model" / "mine").exists()
    assert not (tmp_path / MARKER).exists()
    recipe = tiny_recipe(tmp_path / "model", tmp_path / "grpo")
    (tmp_path / "grpo").mkdir()
    own = tmp_path / "grpo" / "config.yaml"
    own.write_text(dump_recipe(tiny_recipe(tmp_path / "mine", tmp_path / "grpo")))
    with pytest.raises(UserError, match=r"it trains '.*/mine', and the demo '.*/model'; move the run away"):
        demo.train_or_resume(recipe)
    assert own.exists()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("phases", [(), (MADE,)])
def test_a_run_that_is_there_before_the_cold_start_is_no_run_of_the_demo(
    phases: tuple[str, ...], again: bool, tmp_path: Path
) -> None:
    prepare_folder(tmp_path)
    for phase in phases:
        note_phase(tmp_path, phase)
    own = tmp_path / "grpo" / "config.yaml"
    own.parent.mkdir()
    own.touch()
    with pytest.raises(UserError, match=r"grpo' holds a run that the demo did not start, because its SFT is not"):
        prepare_folder(tmp_path, again=again)
    assert own.exists()
    note_phase(tmp_path, MADE)
    note_phase(tmp_path, COLD_START)
    assert prepare_folder(tmp_path) != [] and own.exists(), "the demo's own"


@pytest.mark.parametrize(
    ("error", "code", "saved", "is_trained", "said"),
    [
        (KeyboardInterrupt, 130, (), False, "no step"),
        (Terminated, 143, SAVED[:1], True, "step 7 of sft"),
        (KeyboardInterrupt, 130, SAVED, True, "step 2 of grpo"),
        (Terminated, 143, SAVED, False, "step 7 of sft"),  # the other run is not the demo's
    ],
)
def test_a_demo_that_is_stopped_names_the_saved_step(
    error: type[BaseException],
    code: int,
    saved: tuple[str, ...],
    is_trained: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(folder: Path, again: bool) -> None:
        raise error

    monkeypatch.setattr("octetrl.run.demo.run_demo", stop)
    for folder in saved:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "manifest.json").touch()
    if is_trained:
        note_phase(tmp_path, COLD_START)
    assert run_command(["demo", "--to", str(tmp_path)]) == code
    assert f"{said} is saved; the same command continues the demo" in capsys.readouterr().err


def test_a_run_of_the_demo_without_a_checkpoint_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wrote before its first checkpoint would be refused as another run's."""
    trained = []
    monkeypatch.setattr(demo, "train", lambda recipe, resume: trained.append((resume, left.exists())))
    recipe = tiny_recipe(tmp_path / "model", tmp_path / "sft")
    left = tmp_path / "sft" / "metrics.jsonl"
    left.parent.mkdir()
    left.touch()
    demo.train_or_resume(recipe)
    (tmp_path / "sft" / "checkpoints" / "step_000001").mkdir(parents=True)
    left.touch()
    demo.train_or_resume(recipe)
    assert trained == [(False, False), (True, True)]


def test_a_folder_has_one_demo_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    with folder_lock(tmp_path):
        assert run_command(["demo", "--to", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"octetrl: --to: another demo is running in '{tmp_path}'; wait for it" in said and said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_live_run_of_the_demo_is_not_removed(tmp_path: Path) -> None:
    """As one that `octetrl train` continues."""
    recipe = tiny_recipe(tmp_path / "model", tmp_path / "sft")
    with OutputFolder(recipe, resume=False) as folder:
        folder.keep()
        with pytest.raises(UserError, match="is in use by a live run"):
            demo.train_or_resume(recipe)
        assert (tmp_path / "sft" / "config.yaml").exists()
