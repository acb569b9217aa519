"""Runs whose checkpoints go to a store: resumed on another machine, with a store that fails, refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

import octetrl
from octetrl.cli.main import run_command
from octetrl.run import store as module
from octetrl.run.loop import train
from octetrl.run.store import RunStore
from octetrl.system.errors import RunFailed, UserError
from octetrl.telemetry.ending import read_ending, read_where
from octetrl.trainer import checkpoint
from tests.e2e.tiny_run import read_lines, recipe_tree, run, timeless, tiny_recipe

pytestmark = pytest.mark.usefixtures("rewards_here")
URL = "memory://bucket/runs/mine"
CHANGES: dict[str, Any] = {"steps": 4, "checkpoint.every": 1, "rollout.max_new_tokens": 6, "checkpoint.store": URL}


@pytest.fixture(autouse=True)
def empty_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "PAUSE", 0.0)
    yield
    fsspec.filesystem("memory").store.clear()


def steps_in_store() -> list[int]:
    store = RunStore(URL)
    return sorted(store.manifests(store.sizes()))


def test_a_run_goes_on_from_the_store_alone(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, here, there, again = (tmp_path / name for name in ("whole", "here", "there", "again"))
    lines = run(model, whole, CHANGES | {"checkpoint.store": None})
    train(tiny_recipe(model, here, CHANGES | {"steps": 2}))
    assert steps_in_store() == [1, 2]
    here.rename(tmp_path / "lost")
    assert run_command(["train", URL, "--resume", f"output_dir={there}", "steps=3"]) == 0
    stored = [line["checkpoint/stored_step"] for line in read_lines(there / "metrics.jsonl")[2:]]
    assert stored == [2] and steps_in_store() == [2, 3]
    assert run_command(["status", str(there)]) == 0
    assert f"{URL}: step 2, 0 failed uploads" in capsys.readouterr().out
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_tree(model, again, CHANGES)))
    assert run_command(["train", str(recipe), "--resume", "auto"]) == 0  # on a machine without the folder
    assert timeless(read_lines(again / "metrics.jsonl")) == timeless(lines)
    ours, theirs = (checkpoint.load(folder / "checkpoints" / "step_000004") for folder in (again, whole))
    assert all((ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes() for name in theirs.files)
    assert steps_in_store() == [3, 4]
    assert octetrl.resume(URL).folder == again and steps_in_store() == [3, 4]  # no step is left


def test_a_store_that_fails_is_counted_and_fails_the_run_at_its_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: RunStore, name: str, path: Path) -> None:
        raise UserError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(RunStore, "put", failing)
        tell = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"]
        changes = CHANGES | {"checkpoint.keep_last": 1, "steps": 3}
        changes |= {"logging.notify": {"command": [*tell, str(tmp_path / "told")]}}
        recipe = tiny_recipe(model, tmp_path / "run", changes)
        with pytest.raises(RunFailed):
            train(recipe)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 3 and lines[-1]["checkpoint/failed_uploads"] >= 1 and lines[-1]["checkpoint/stored_step"] == 0
    ending = read_ending(read_where(tmp_path / "run"))
    assert ending is not None and ending.how == "failed" and steps_in_store() == []
    assert "no network" in (tmp_path / "run" / "warnings.jsonl").read_text()
    assert not (tmp_path / "run" / "checkpoints" / "step_000001").exists()  # pruned, as it is not sent any more
    train(recipe, resume=True)  # has no step left, and sends what is missing
    assert steps_in_store() == [3]
    told = [(one["event"], one["step"]) for one in read_lines(tmp_path / "told")]
    assert told[0][0] == "warning" and told[-2:] == [("failure", 3), ("end", 3)]
    assert b'"finished"' in (RunStore(URL).read("run.json") or b"")


def test_wrong_stores_are_refused_by_check_and_train(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "notes.txt").write_text("a user's own")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", CHANGES)))
    own = f"file://{tmp_path / 'run'}"  # its output_dir
    for url in ("nope://bucket/mine", "gs://bucket/mine", "runs/mine", f"file://{files}", own):
        for verb in ("check", "train"):
            assert run_command([verb, str(recipe), f"checkpoint.store={url}"]) == 2, url
            assert "checkpoint.store" in capsys.readouterr().err, url
    for url in ("nope://bucket/mine", f"file://{files}", "memory://bucket/empty"):
        assert run_command(["train", url, "--resume", f"output_dir={tmp_path / 'run'}"]) == 2, url
    assert not (tmp_path / "run").exists() and [path.name for path in files.iterdir()] == ["notes.txt"]
    train(tiny_recipe(model, tmp_path / "first", CHANGES | {"steps": 1}))
    assert run_command(["check", str(recipe)]) == 0
    assert run_command(["train", str(recipe)]) == 2  # another run is there
    assert run_command(["train", URL]) == 2  # without --resume
    assert not (tmp_path / "run").exists() and steps_in_store() == [1]
