"""Files in a run's folder that the run did not write: it neither overwrites nor follows nor removes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.run.folder import output_folder
from octetrl.run.folder.layout import is_held, refuse_live, remove_run
from octetrl.run.folder.output_folder import OutputFolder, read_run_id
from octetrl.system.errors import UserError

EARLY = {  # what a run writes before its recipe
    "lock": "4194304",
    "workers.json": '{"time": 1.0, "workers": []}',
    ".workers.json": "",
    "config.yaml.partial": "precision: ",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe() -> Recipe:
    return recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "sums"}, "output_dir": "runs/one"})


def begin(given: Recipe, *, resume: bool = False) -> None:
    with OutputFolder(given, resume=resume) as folder:
        folder.keep()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("run.json", content) for content in ("", '{"speed": 3}', '{"run": "0123456789ab"}')),
        *((name, "mine") for name in (*EARLY, "run.json.partial", "rollouts")),
        *(("lock", content) for content in ("package-lock", "12 13")),
    ],
)
def test_a_file_that_no_run_wrote_stays(name: str, content: str) -> None:
    Path("runs/one").mkdir(parents=True)
    Path("runs/one", name).write_text(content)
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"^output_dir: 'runs/one' holds {name}, "):
            begin(recipe(), resume=resume)
        assert [(path.name, path.read_text()) for path in Path("runs/one").iterdir()] == [(name, content)]


@pytest.mark.parametrize("name", ["lock", "config.yaml", "rollouts"])
@pytest.mark.parametrize("kind", ["a link", "a dangling link", "a pipe", "a folder"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(name: str, kind: str, here: Path) -> None:
    Path("runs/one").mkdir(parents=True)
    place, target = Path("runs/one", name), here / "precious"
    if kind == "a pipe":
        os.mkfifo(place)
    elif kind == "a folder":
        place.mkdir()
        (place / "mine").write_text("12345")
    else:
        place.symlink_to(target)
        if kind == "a link":
            target.write_text("12345")
    with pytest.raises(UserError, match=r"^output_dir: 'runs/one' (already )?holds "):
        begin(recipe())
    assert os.listdir("runs/one") == [name] and not is_held(Path("runs/one"))
    assert not target.exists() or target.read_text() == "12345"


def test_a_run_that_begins_again_forgets_what_it_wrote_only() -> None:
    begin(recipe())
    for name in ("metrics.jsonl", "warnings.jsonl", "rollouts/step_000001.jsonl", "notes.txt", "logs/mine.log"):
        Path("runs/one", name).parent.mkdir(exist_ok=True)
        Path("runs/one", name).write_text("")
    Path("elsewhere").mkdir()
    Path("elsewhere/mine").write_text("")
    Path("runs/one/evaluations").symlink_to(Path("elsewhere").resolve())
    remove_run(Path("runs/one"))
    assert sorted(str(path) for path in Path("runs/one").rglob("*") if not path.is_dir()) == [
        "runs/one/logs/mine.log",
        "runs/one/notes.txt",
    ]
    assert Path("elsewhere/mine").exists()
    begin(recipe())


def test_a_live_run_is_left_alone() -> None:
    with OutputFolder(recipe(), resume=False) as folder:
        folder.keep()
        with pytest.raises(UserError, match=f"is in use by a live run .process {os.getpid()}"):
            refuse_live(Path("runs/one"))
    refuse_live(Path("runs/one"))


def test_what_a_run_left_that_was_killed_at_its_start_is_replaced() -> None:
    Path("runs/one/logs").mkdir(parents=True)
    for name, content in EARLY.items():
        Path("runs/one", name).write_text(content)
    begin(recipe())
    assert Path("runs/one/lock").read_text() == str(os.getpid())
    assert Path("runs/one/workers.json").read_text() == EARLY["workers.json"]  # until the workers report
    Path("runs/one/run.json").unlink()  # a kill between the recipe and the id
    begin(recipe(), resume=True)
    assert read_run_id(Path("runs/one")) is not None


def test_a_start_that_cannot_write_its_id_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_folder, "write_run_id", full)
    with pytest.raises(UserError, match=r"^output_dir: cannot write in '.*runs/one' \(No space left on device\)"):
        begin(recipe())
    assert not Path("runs").exists()
