"""`--resume auto`, as a scheduler starts a run again and again, and `octetrl.resume` from a run's folder alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import octetrl
from octetrl.cli.main import run_command
from octetrl.telemetry.ending import read_ending, read_where
from tests.e2e import tiny_rewards
from tests.e2e.test_library import TASKS, settings
from tests.e2e.tiny_run import read_lines, recipe_tree, tiny_recipe


class Stop(octetrl.Callback):
    """Ends the run after step 2."""

    def on_step(self, view: octetrl.RunView) -> None:
        if view.step == 2:
            view.stop("it is enough")


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_lines(folder / "metrics.jsonl")]


def test_auto_starts_continues_and_ends(model: Path, tmp_path: Path) -> None:
    """One command line of a scheduler: the first time it starts, killed it continues, finished it does nothing."""
    whole = tiny_recipe(model, tmp_path / "run", {"steps": 2, "checkpoint.every": 1})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(whole.model_dump(mode="json")))
    folder = tmp_path / "run"
    assert run_command(["train", str(recipe), "--resume", "auto", "steps=1"]) == 0
    assert steps_of(folder) == [1]
    assert run_command(["train", str(recipe), "--resume=auto"]) == 0
    assert steps_of(folder) == [1, 2]
    at_end = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"}
    assert run_command(["train", "--resume", "auto", str(recipe)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "lock"} == at_end
    assert run_command(["train", str(recipe), "--resume", "auto", "seed=9"]) == 2, "another recipe"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}")
    assert run_command(["train", str(recipe), "--resume", "auto", f"output_dir={tmp_path / 'other'}"]) == 2


def test_a_folder_is_enough_but_for_objects_of_python(model: Path, tmp_path: Path) -> None:
    def noise(task: octetrl.Task, text: str) -> float:
        return tiny_rewards.by_text(task, text)

    def other(task: octetrl.Task, text: str) -> float:
        return 1.0

    folder = tmp_path / "run"
    octetrl.train(tasks=TASKS, reward=noise, callbacks=[Stop()], **settings(model, folder))
    for given, lacking in (
        ({}, ("tasks", "reward", "callbacks")),
        ({"tasks": TASKS, "callbacks": []}, ("reward",)),
        ({"tasks": TASKS, "reward": noise}, ("callbacks",)),
    ):
        with pytest.raises(octetrl.UserError) as error:
            octetrl.resume(folder, steps=3, **given)  # type: ignore[arg-type]
        named = [word for word in ("tasks", "reward", "callbacks") if f"{word}=..." in str(error.value)]
        assert tuple(named) == lacking
    several = recipe_tree(model, tmp_path / "two")
    del several["environment"]
    several["environments"] = {
        "sums": {"kind": "python", "dataset": "given:dataset_sums", "reward": "given:reward_sums"}
    }
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.yaml").write_text(json.dumps(several))
    with pytest.raises(octetrl.UserError, match=r"again: environments=\{'sums': \{'tasks': ..., 'reward': ...\}\}"):
        octetrl.resume(tmp_path / "two")
    with pytest.raises(octetrl.UserError, match=r"reward is \"given:other\""):
        octetrl.resume(folder, tasks=TASKS, reward=other, callbacks=[])
    run = octetrl.resume(folder, tasks=TASKS, reward=noise, callbacks=[], trainer={"optimizer": {"lr": 1e-4}}, steps=3)
    assert [line["step"] for line in run.metrics] == [1, 2, 3] and run.recipe.trainer.optimizer.lr == 1e-4
    assert run.recipe.trainer.tokens_per_micro_batch == 512, "the rest of the section is the run's"
    with pytest.raises(octetrl.UserError, match="seed"):
        octetrl.resume(folder, tasks=TASKS, reward=noise, seed=9)


def test_a_run_that_a_callback_ended_is_finished_and_its_folder_names_what_a_module_has(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward's module lies in a folder that is searched no longer when the run is resumed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_rewards.py").write_text("from tests.e2e.tiny_rewards import by_text\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "mine")])
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    changes = settings(model, tmp_path / "run", tasks=tmp_path / "tasks.jsonl", reward="own_rewards:by_text", steps=3)
    for _ in range(2):
        run = octetrl.train(callbacks=["tests.e2e.test_resume_again:Stop"], resume="auto", **changes)
        assert [line["step"] for line in run.metrics] == [1, 2]
    ending = read_ending(read_where(run.folder))
    assert ending is not None and "it is enough" in ending.why
    monkeypatch.setattr(sys, "path", sys.path[:-1])
    assert [line["step"] for line in octetrl.resume(run.folder).metrics] == [1, 2, 3], "asked for, it goes on"
    with pytest.raises(octetrl.UserError, match="holds no run"):
        octetrl.resume(tmp_path / "nothing")
