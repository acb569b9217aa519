"""Saves beside steps: what stops the run, when a save becomes visible, and what happens when one fails."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octetrl.config.schema import CheckpointConfig
from octetrl.data.tokenizer import load_tokenizer
from octetrl.environments.tasks import NoTasks
from octetrl.rollout.collect import ExpectedLengths
from octetrl.run.checkpoints import Checkpoints
from octetrl.run.loop import after_loss
from octetrl.run.resume import Cursor
from octetrl.run.step import GenerateThenLearn
from octetrl.run.tiny_model import save_tokenizer
from octetrl.system.errors import RunFailed, UserError
from octetrl.trainer import checkpoint, state_writer
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.state_writer import StateWriter
from octetrl.workers.team import WorkerLost


class OneTensor:
    """Workers whose state is one number, on a disk that can be held and can fail."""

    def __init__(self) -> None:
        self.state, self.policy_version, self.weights_are_whole = torch.zeros(1), 0, True
        self.copies = 0
        self.disk_works, self.disk_fails = threading.Event(), False
        self.disk_works.set()
        self._writer = StateWriter(lambda: {"state.safetensors": {"w": self.state}}, torch.device("cpu"))

    def step(self) -> None:
        self.state += 1
        self.policy_version += 1

    def prepare_saving(self) -> None:
        self._writer.prepare()

    def copy_state(self) -> str | None:
        self.copies += 1
        return self._writer.copy()

    def write_state(self, folder: Path, *, copied: bool) -> list[WrittenFile]:
        assert self.disk_works.wait(120)
        if self.disk_fails:
            raise OSError(5, "Input/output error")
        return self._writer.write(folder, copied=copied)


class Warnings:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)

    note = warn


@pytest.fixture
def run(tmp_path: Path) -> Any:
    save_tokenizer(["a b"], tmp_path / "tokenizer")
    return SimpleNamespace(
        workers=OneTensor(),
        console=Warnings(),
        config=SimpleNamespace(steps=100),
        tokenizer=load_tokenizer(tmp_path / "tokenizer", 1000),
        taskset=NoTasks(),
        conversations=None,
        lengths=ExpectedLengths(),
        method=GenerateThenLearn(),
    )


@pytest.fixture
def saves(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", CheckpointConfig(every=1), "run")


def stage(saves: Checkpoints, run: Any, step: int, *, is_last: bool = False) -> float:
    run.workers.step()
    return saves.stage(run, step, {}, is_last=is_last)["time/checkpoint"]


def saved(saves: Checkpoints) -> dict[str, float]:
    """The state in each visible checkpoint."""
    found = {path.name: checkpoint.load(path) for path in saves.folder.glob("step_*")}
    return {name: float(one.tensors("state.safetensors")["w"]) for name, one in found.items()}


def test_a_step_runs_beside_a_save_and_the_next_save_waits(run: Any, saves: Checkpoints) -> None:
    workers = run.workers
    with saves.open(run, 0):
        stage(saves, run, 1)
        assert not saves.folder.exists()  # its line is not on the disk
        workers.disk_works.clear()
        saves.write()
        workers.step()  # runs while the disk holds
        assert saves.figures() == {} and saved(saves) == {}
        threading.Timer(1.5, workers.disk_works.set).start()
        assert stage(saves, run, 3) > 0.2
        assert saved(saves) == {"step_000001": 1.0}
        figures = saves.figures()
        assert figures["checkpoint/write_seconds"] > 0.2 and figures["checkpoint/gb_per_second"] > 0
        assert saves.figures() == {}
        saves.write()
    assert saved(saves) == {"step_000001": 1.0, "step_000003": 3.0} and saves.num_saved == 2
    files = checkpoint.load(saves.folder / "step_000003").files
    assert "tokenizer.json" in files and "cursor.json" in files
    assert not list(saves.folder.glob(".*"))


def test_saving_is_prepared_if_a_step_follows_a_checkpoint(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save needs no copy, so it needs no room for one."""
    prepared: list[tuple[int, int, int]] = []
    cases = [(every, start, steps) for every in (0, 2) for start in (0, 1, 2) for steps in (3, 4, 5)]
    for case in cases:
        every, start, run.config.steps = case
        monkeypatch.setattr(run.workers, "prepare_saving", lambda case=case: prepared.append(case))
        with Checkpoints(tmp_path / "saves", CheckpointConfig(every=every), "run").open(run, start):
            pass
    assert prepared == [(2, 0, 3), (2, 0, 4), (2, 0, 5), (2, 1, 3), (2, 1, 4), (2, 1, 5), (2, 2, 5)]


@pytest.mark.parametrize("found_by", ["write", "stage", "end", "naming the last one"])
def test_a_save_that_fails_is_the_next_steps_error(found_by: str, run: Any, saves: Checkpoints) -> None:
    with pytest.raises(UserError) as failure, saves.open(run, 0):
        stage(saves, run, 1)
        saves.write()
        saves.latest()
        run.workers.disk_fails = True
        stage(saves, run, 2)
        saves.write()
        if found_by == "naming the last one":
            assert saves.latest() == saves.folder / "step_000001"
        if found_by in ("write", "stage"):
            with pytest.raises(UserError) as early:
                if found_by == "write":
                    saves.latest()
                    saves.write()
                else:
                    stage(saves, run, 3)
            raise early.value
    text = str(failure.value)
    assert (
        "step_000002 can't be written: [Errno 5] Input/output error (the last whole checkpoint is step_000001)" in text
    )
    assert "\n" not in text and saved(saves) == {"step_000001": 1.0}
    assert run.console.texts == [] and not list(saves.folder.glob(".*"))


def test_an_error_of_the_run_is_not_hidden_by_a_failed_save(run: Any, saves: Checkpoints) -> None:
    """The save that failed is a warning. Its copy is stale: the interrupted run is saved from the live state."""
    with pytest.raises(RuntimeError, match="the lights went out"), saves.open(run, 0):
        stage(saves, run, 1)
        run.workers.disk_fails = True
        saves.write()
        saves.latest()
        run.workers.disk_fails = False
        run.workers.step()
        assert "saved step 2" in saves.save_interrupted(run, Cursor.of(run, 2))
        raise RuntimeError("the lights went out")
    assert saved(saves) == {"step_000002": 2.0}
    assert len(run.console.texts) == 1 and "the last save failed as well: checkpoint" in run.console.texts[0]


def test_a_save_that_lost_its_worker_does_not_repeat_the_error_of_the_run(
    run: Any, saves: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = WorkerLost("worker 0 was lost; it printed:\n    words")

    def write_state(folder: Path, *, copied: bool) -> list[WrittenFile]:
        raise lost

    with pytest.raises(WorkerLost), saves.open(run, 0):
        monkeypatch.setattr(run.workers, "write_state", write_state)
        stage(saves, run, 1)
        saves.write()
        saves.latest()
        raise WorkerLost(f"step 2: {lost}") from lost
    assert run.console.texts == ["the last save failed as well: its worker is lost"]


def test_a_run_that_lost_a_worker_names_its_last_checkpoint(run: Any, saves: Checkpoints, tmp_path: Path) -> None:
    assert after_loss(tmp_path, "run").startswith("the run had not begun")
    (tmp_path / "config.yaml").touch()
    assert "no checkpoint is there yet: continue with --resume" in after_loss(tmp_path, "run")
    with saves.open(run, 0):
        stage(saves, run, 3)
        saves.write()
        saves.latest()
    said = after_loss(saves.folder.parent, "run")
    assert said.startswith(f"the last checkpoint is step 3, in {saves.folder}: continue with --resume")


def test_half_updated_weights_are_not_saved_as_the_step_before(run: Any, saves: Checkpoints) -> None:
    with saves.open(run, 0):
        stage(saves, run, 1)
        saves.write()
        run.workers.step()
        before = Cursor.of(run, 2)
        run.workers.weights_are_whole = False
        said = saves.save_interrupted(run, before)
        assert said == "cut off in step 3, while the weights changed: continue from step 1 with --resume"
        run.workers.weights_are_whole = True
        run.workers.policy_version += 1  # the update was complete, its step was not
        assert "while the weights changed" in saves.save_interrupted(run, before)
    assert saved(saves) == {"step_000001": 1.0}


def test_a_run_that_fails_by_a_limit_saves_what_it_learnt(run: Any, saves: Checkpoints) -> None:
    with saves.open(run, 0):
        with pytest.raises(RunFailed, match=r"^nothing learnt$"), saves.saved_if_failed(run, 1, {}):
            raise RunFailed("nothing learnt")
        assert saved(saves) == {}
        for _ in range(2):
            run.workers.step()
        for step in (2, 2):  # the second time it is saved already
            with pytest.raises(RunFailed, match=r"^three empty steps$"), saves.saved_if_failed(run, step, {}):
                raise RunFailed("three empty steps")
    assert saved(saves) == {"step_000002": 2.0} and run.console.texts == ["step 2 is saved"]


def test_a_disk_that_fails_too_does_not_hide_why_the_run_failed(run: Any, saves: Checkpoints) -> None:
    with saves.open(run, 0):
        run.workers.step()
        run.workers.step()
        run.workers.disk_fails = True
        with pytest.raises(RunFailed, match=r"^the reward fails$"), saves.saved_if_failed(run, 2, {}):
            raise RunFailed("the reward fails")
        said = saves.save_interrupted(run, Cursor.of(run, 2))
    assert said.startswith("cut off in step 3: saving step 2 failed as well (checkpoint ") and "Errno 5" in said
    (warning,) = run.console.texts
    assert warning.startswith("saving step 2 failed as well: checkpoint ") and saved(saves) == {}


def test_the_last_save_takes_no_copy(run: Any, saves: Checkpoints) -> None:
    with saves.open(run, 0):
        stage(saves, run, 1, is_last=True)
        assert saved(saves) == {} and saves.figures()["checkpoint/write_seconds"] > 0
        saves.write()
        assert saved(saves) == {"step_000001": 1.0}
    assert run.workers.copies == 0


def test_without_room_for_a_copy_each_save_stops_the_run(
    run: Any, saves: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "available_host_bytes", lambda: 100)
    with saves.open(run, 0):
        for step in (1, 2):
            stage(saves, run, step)
            assert f"step_00000{step}" not in saved(saves)
            saves.write()
            assert saved(saves)[f"step_00000{step}"] == step
    (warning,) = run.console.texts
    assert warning.startswith("each checkpoint stops the run while it is written: a copy takes 0.00 GiB of host memory")


def test_a_step_whose_line_was_not_written_has_no_checkpoint(run: Any, saves: Checkpoints) -> None:
    for is_last in (False, True):
        saves = Checkpoints(saves.folder, CheckpointConfig(every=1), "run")
        with pytest.raises(UserError, match="no space left"), saves.open(run, 0):
            stage(saves, run, 1, is_last=is_last)
            raise UserError("no space left to write metrics.jsonl")
        assert not list(saves.folder.glob("*")) and not list(saves.folder.glob(".*"))
