"""The run folder: one live run at a time, one recipe for life, no other run's files touched, and no trace of a run that
was refused."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
import yaml

from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.run.folder import layout
from octetrl.run.folder.layout import is_held
from octetrl.run.folder.output_folder import OutputFolder, read_run_id
from octetrl.system.errors import UserError
from tests.saved_checkpoint import save_checkpoint


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
    assert sorted(path.name for path in Path("runs/one").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "lock",
        "run.json",
    ]


def test_a_run_that_was_refused_leaves_nothing(here: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer"), OutputFolder(recipe(), resume=False) as folder:
        assert folder.path.is_dir()
        raise UserError("no tokenizer")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_folder_stays_where_it_is_if_the_working_directory_changes(is_kept: bool, here: Path) -> None:
    """As by an environment's code."""
    with OutputFolder(recipe(), resume=False) as folder:
        os.chdir("/")
        if is_kept:
            folder.keep()
    assert folder.path == here / "runs/one" and (folder.path / "config.yaml").exists() == is_kept
    assert [path.name for path in here.iterdir()] == (["runs"] if is_kept else [])


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
    with pytest.raises(UserError, match=r"holds no run \(no config.yaml\); leave --resume out"):
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
    with pytest.raises(UserError, match=rf"another recipe: .*{next(iter(changed))}.* is .*, was "):
        OutputFolder(recipe(**changed), resume=True)
    assert Path("runs/one/config.yaml").read_bytes() == before


def test_resume_takes_another_path_to_the_same_folder(here: Path) -> None:
    Path("m").mkdir()
    Path("link").symlink_to("m")
    begin(recipe())
    for path in (here / "m", "./m", "link"):
        begin(recipe(model={"path": str(path)}), resume=True)
    Path("link").unlink()
    with pytest.raises(UserError, match=r"model\.path"):
        begin(recipe(model={"path": "n"}), resume=True)


def test_resume_may_prolong_a_run_and_log_it_otherwise() -> None:
    begin(recipe())
    changed = {"steps": 500, "logging": {"console": "plain"}, "checkpoint": {"every": 3}, "evaluation": {"every": 2}}
    begin(recipe(**changed), resume=True)
    assert yaml.safe_load(Path("runs/one/config.yaml").read_text())["steps"] == 500


def test_two_live_runs_are_kept_apart_and_a_dead_ones_lock_is_free() -> None:
    with OutputFolder(recipe(), resume=False) as folder:
        folder.keep()
        with pytest.raises(UserError, match=rf"in use by a live run \(process {os.getpid()}\)"):
            OutputFolder(recipe(), resume=True)
        Path("runs/one/lock").unlink()  # by somebody who takes it for a leftover
        with pytest.raises(UserError, match="in use by a live run"):
            OutputFolder(recipe(), resume=True)
        assert is_held(Path("runs/one"))
    begin(recipe(), resume=True)


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    Path("runs").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="cannot write in 'runs/one'") as refusal:
        OutputFolder(recipe(), resume=False)
    assert "\n" not in str(refusal.value)
    assert Path("runs").read_text() == "a file where a folder should be"


# --- what a refused run takes away --------------------------------------------------------------------------


def test_a_refused_run_leaves_what_others_made_meanwhile(here: Path) -> None:
    """A made `sweep/` for itself; B began in it before A was refused."""
    with OutputFolder(recipe(output_dir="sweep/b"), resume=False) as b:
        b.keep()
    shutil.rmtree("sweep")
    with pytest.raises(UserError, match="late"), OutputFolder(recipe(output_dir="sweep/a"), resume=False):
        with OutputFolder(recipe(output_dir="sweep/b"), resume=False) as b:
            b.keep()
        Path("sweep/a/thesis.txt").write_text("somebody else's")
        raise UserError("late")
    assert {path.name for path in Path("sweep/b").iterdir()} == {"checkpoints", "config.yaml", "lock", "run.json"}
    assert [path.name for path in Path("sweep/a").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("looked_at", ["runs/one/lock", "runs/one"])
def test_a_run_starts_although_status_looks_at_its_lock(looked_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(recipe())
    probe = os.open(looked_at, os.O_RDONLY)
    fcntl.flock(probe, fcntl.LOCK_SH)  # as `octetrl status`, which holds it for an instant
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        fcntl.flock(probe, fcntl.LOCK_UN)

    monkeypatch.setattr(layout.time, "sleep", sleep)
    begin(recipe(), resume=True)
    os.close(probe)
    assert waited == [layout.PROBED]


def _open_and_refuse(folder: str, until: float) -> None:
    """A process that is refused again and again. Whenever it holds the folder, nobody else may."""
    while time.monotonic() < until:
        try:
            with OutputFolder(recipe(output_dir=folder), resume=False):
                Path("held").mkdir()  # FileExistsError: two processes held one folder
                Path("held").rmdir()
                raise UserError("refused late")
        except UserError as error:
            assert "refused late" in str(error) or "in use by a live run" in str(error), error


def test_two_processes_race_for_a_folder_that_comes_and_goes(here: Path) -> None:
    """The lock file and its folders are made and removed all the time; never do two processes hold them at once."""
    until = time.monotonic() + 1.5
    processes = [
        multiprocessing.get_context("fork").Process(target=_open_and_refuse, args=("sweep/deep/one", until))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    # Each takes away what it made itself; folders that one made while the other held the lock may stay, empty.
    assert {path.name for path in here.rglob("*")} <= {"sweep", "deep", "one", "lock"}


# --- whose a folder is --------------------------------------------------------------------------------------


def put_checkpoint(step: int, run_id: str | None, folder: str = "runs/one") -> None:
    save_checkpoint(Path(folder) / "checkpoints", step, {"cursor.json": {"step": step}}, run_id=run_id)


def put_metrics(last: int) -> None:
    Path("runs/one/metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, last + 1)))


@pytest.mark.parametrize(
    "left",
    [
        *("metrics.jsonl", "checkpoints/step_000098/x", "rollouts/x", "events.out.tfevents.1"),
        *("warnings.jsonl", "report.html", "history.jsonl"),
        *("warnings.jsonl.partial", ".report.html"),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_what_another_run_left_is_refused_and_stays(left: str, resume: bool) -> None:
    """`config.yaml` is missing: nothing is begun over the rest, with --resume or without."""
    Path("runs/one", left).parent.mkdir(parents=True)
    Path("runs/one", left).write_text("{}")
    with pytest.raises(UserError) as refusal:
        OutputFolder(recipe(), resume=resume)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith(f"output_dir: 'runs/one' holds {left.split('/')[0]}, ")
    assert Path("runs/one", left).read_text() == "{}"
    assert not Path("runs/one/lock").exists()


def test_what_is_nobodys_run_may_be_there() -> None:
    Path("runs/one/checkpoints").mkdir(parents=True)
    Path("runs/one/console.log").write_text("the shell writes here")
    begin(recipe())
    assert Path("runs/one/console.log").exists()


def test_checkpoints_of_another_run_are_named_and_not_resumed_from() -> None:
    begin(recipe())
    own = read_run_id(Path("runs/one"))
    put_checkpoint(2, own)
    put_checkpoint(98, "another")
    put_checkpoint(100, None)
    with pytest.raises(UserError, match=r"of another run \(step_000098, step_000100\); move them"):
        OutputFolder(recipe(), resume=True)
    for name in ("step_000098", "step_000100"):
        shutil.rmtree(f"runs/one/checkpoints/{name}")
    begin(recipe(), resume=True)
    assert read_run_id(Path("runs/one")) == own


@pytest.mark.parametrize("run_id", [None, "0a1b2c"])
def test_a_folder_without_run_json_is_its_checkpoints(run_id: str | None) -> None:
    """None: a run from before there were ids; it goes on without one."""
    begin(recipe())
    Path("runs/one/run.json").unlink()
    put_checkpoint(3, run_id)
    with OutputFolder(recipe(), resume=True) as folder:
        assert folder.run_id == run_id
        folder.keep()
    assert Path("runs/one/run.json").exists() == (run_id is not None)
    put_checkpoint(4, "another")
    if run_id is None:
        with pytest.raises(UserError, match="checkpoints of 2 runs"):
            OutputFolder(recipe(), resume=True)


def test_a_run_that_lost_its_checkpoints_does_not_start_over_its_metrics() -> None:
    given = recipe(checkpoint={"every": 5})
    begin(given)
    put_metrics(5)
    begin(given, resume=True)  # cut off before the first checkpoint was whole: it starts from the beginning
    put_metrics(9)
    begin(given, resume=True)  # steps ran while it was written
    put_metrics(10)
    with pytest.raises(UserError, match=r"metrics up to step 10 but no checkpoint; restore checkpoints/,"):
        OutputFolder(given, resume=True)
    put_metrics(3)
    Path("runs/one/checkpoints").rmdir()
    with pytest.raises(UserError, match="metrics up to step 3 but no checkpoint"):
        OutputFolder(given, resume=True)
    assert Path("runs/one/metrics.jsonl").read_text().count("\n") == 3


def test_a_resumed_run_changes_what_is_allowed_and_keeps_its_history() -> None:
    begin(recipe())
    faster = recipe(trainer={"optimizer": {"lr": 1e-4}, "tokens_per_micro_batch": 64})
    with pytest.raises(UserError) as error:
        OutputFolder(faster, resume=True, allowed=["trainer.optimizer.lr"])
    assert "trainer.tokens_per_micro_batch is 64, was 16384;" in str(error.value)
    assert "--allow trainer.tokens_per_micro_batch=64" in str(error.value)
    assert not Path("runs/one/history.jsonl").exists()
    with OutputFolder(
        faster, resume=True, allowed=["trainer.optimizer.lr", "trainer.tokens_per_micro_batch"]
    ) as folder:
        folder.keep()
        folder.keep()  # again, when its workers are built again
    lines = [json.loads(line) for line in Path("runs/one/history.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "field": "trainer.optimizer.lr", "old": 1e-6, "new": 1e-4},
        {"step": 0, "field": "trainer.tokens_per_micro_batch", "old": 16384, "new": 64},
    ]
    begin(faster, resume=True)
    assert len(Path("runs/one/history.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("changed", [{"seed": 5}, {"precision": "fp8"}, {"model": {"path": "n"}}])
def test_what_the_checkpoint_depends_on_cannot_be_allowed(changed: dict[str, object]) -> None:
    begin(recipe())
    with pytest.raises(UserError, match="its checkpoint depends on"):
        OutputFolder(recipe(**changed), resume=True, allowed=list(changed))
