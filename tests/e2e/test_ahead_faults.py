"""A run that generates ahead of training, whose workers and driver die: no group is skipped, none is taken twice.

With `checkpoint.batches_ahead: saved` and one version ahead it is the run that nobody killed, byte for byte. Here the
workers are threads, and the driver is a process that really dies; test_ray_run.py kills workers on Ray.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.run.loop import train
from octetrl.run.state import StepResult
from octetrl.system.errors import RunFailed
from octetrl.trainer import checkpoint
from octetrl.workers import build_workers as build
from octetrl.workers.team import Call, WorkerLost
from tests.e2e.faults import measured
from tests.e2e.killed_run import _processes
from tests.e2e.test_evaluation import DRAWING
from tests.e2e.tiny_run import make_model, read_lines, recipe_tree
from tests.unit.workers.thread_team import RunTeam

pytestmark = pytest.mark.slow
STEPS = 5
TRAINER, ENGINE = 0, 1
CHANGES: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 9,
    "cluster.trainer_cpus": 1,
    "cluster.engine_cpus": 1,
    "cluster.device": "auto",
    "environment.reward": None,
    **DRAWING,  # its tasks draw from the global generators of the process whenever they are read
}


class StruckTeam(RunTeam):
    """`strikes`: (worker, verb, how many of its calls begin before) of the workers that die, one of each start."""

    strikes: Iterator[tuple[int, str, int]]
    kills_driver = False

    def __init__(self, recipe: Recipe, *_: Any, **__: Any) -> None:
        super().__init__(recipe)
        self._strike = next(self.strikes, (0, "", 0))

    def begin(self, worker: int, verb: str, *arguments: Any) -> Call:
        doomed, its_verb, after = self._strike
        if (worker, verb) == (doomed, its_verb) and self.begun.count((worker, verb)) == after:
            if self.kills_driver:
                os.kill(os.getpid(), signal.SIGKILL)
            raise WorkerLost(f"worker {worker} was lost before {verb}")
        return super().begin(worker, verb, *arguments)


def struck(*strikes: tuple[int, str, int], kills_driver: bool = False) -> type[StruckTeam]:
    return type("Struck", (StruckTeam,), {"strikes": iter(strikes), "kills_driver": kills_driver})


def drawn_tasks(folder: Path) -> list[list[str]]:
    """Of each step, by its file of rollouts."""
    files = sorted((folder / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step_{step:06}.jsonl" for step in range(1, STEPS + 1)]
    return [[json.loads(row)["task_id"] for row in file.read_text().splitlines()] for file in files]


def assert_same(folder: Path, whole: Path) -> None:
    """Metrics less those of the clock, rollouts, and the last checkpoint, with the random generators of the process."""
    assert measured(folder / "metrics.jsonl") == measured(whole / "metrics.jsonl")
    for file in sorted((whole / "rollouts").iterdir()):
        assert (folder / "rollouts" / file.name).read_bytes() == file.read_bytes(), file.name
    ours, theirs = (checkpoint.load(place / "checkpoints" / f"step_{STEPS:06}") for place in (folder, whole))
    assert set(ours.files) == set(theirs.files)
    for name in ours.files:
        assert (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes(), name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


def run_with(team: type[RunTeam], tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(build, "start_team", team)
        train(recipe_from_mapping(tree))


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one version ahead that nobody kills."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run_with(RunTeam, recipe_tree(model, folder, CHANGES | {"cluster.max_staleness": 1}), patch)
    return folder


def test_saved_batches_make_the_run_that_nobody_killed(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = CHANGES | {"cluster.max_staleness": 1, "cluster.max_restarts": 3, "checkpoint.batches_ahead": "saved"}
    changes["logging.console"] = "plain"
    folder = tmp_path / "run"
    team = struck((TRAINER, "train", 2), (ENGINE, "receive_weights", 3), (TRAINER, "write_state", 0))
    run_with(team, recipe_tree(model, folder, changes), monkeypatch)
    assert next(team.strikes, None) is None  # all of them struck
    assert_same(folder, whole)
    starts = capsys.readouterr().out.split("new weights arrive in a second buffer: ")
    assert len(starts) == 1 + 4 and "step 1" not in starts[0], "each start names the buffer, before its first step"


def test_a_run_that_fails_by_a_limit_saves_its_batches(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"cluster.max_staleness": 1, "checkpoint.batches_ahead": "saved", "checkpoint.every": 0}
    tree = recipe_tree(model, tmp_path / "run", CHANGES | changes)

    def fail(result: StepResult, _: Recipe, step: int) -> None:
        if step == 2:
            raise RunFailed("too many failures")

    with monkeypatch.context() as patch:
        patch.setattr(StepResult, "check_failures", fail)
        with pytest.raises(RunFailed, match="too many failures"):
            run_with(RunTeam, tree, monkeypatch)
    monkeypatch.setattr(build, "start_team", RunTeam)
    train(recipe_from_mapping(tree), resume=True)
    assert_same(tmp_path / "run", whole)


def test_batches_that_another_temperature_sampled_are_drawn_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer divides by the temperature of now."""
    changes = {"cluster.max_staleness": 1, "checkpoint.batches_ahead": "saved", "trainer.optimizer.lr": 0.0, "steps": 3}
    tree, folder = recipe_tree(model, tmp_path / "run", CHANGES | changes), tmp_path / "run"
    run_with(RunTeam, tree, monkeypatch)
    for step in (2, 3):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:06d}")
    tree["rollout"]["temperature"] = 0.5
    monkeypatch.setattr(build, "start_team", RunTeam)
    train(recipe_from_mapping(tree), resume=True, allowed=["rollout.temperature"])
    assert [line["mismatch/max_abs_diff"] for line in read_lines(folder / "metrics.jsonl")] == [0.0] * 3


@pytest.mark.parametrize("how", ["saved", "drawn_again"])
def test_batches_of_lost_workers_are_drawn_again_from_the_same_tasks(
    how: str, model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = CHANGES | {"cluster.max_staleness": 2, "cluster.max_restarts": 2, "checkpoint.batches_ahead": how}
    changes["cluster.weights_in_flight"] = "off" if how == "saved" else "keep_cache"
    folder = tmp_path / "run"
    team = struck((ENGINE, "open_session", 2), (TRAINER, "train", 1))
    run_with(team, recipe_tree(model, folder, changes), monkeypatch)
    assert next(team.strikes, None) is None
    assert drawn_tasks(folder) == drawn_tasks(whole)
    assert all(0.0 <= line["rollout/staleness"] <= 2.0 for line in measured(folder / "metrics.jsonl"))
    warned = "".join(path.read_text() for path in folder.glob("warnings.jsonl"))
    assert ("keep_cache cannot keep a calibrated KV cache" in warned) == (how != "saved")
    assert json.loads((folder / "run.json").read_text()).get("weights_in_flight") == (
        None if how == "saved" else "recompute_cache"
    )


def _train(tree: dict[str, Any], strike: tuple[int, str, int] | None) -> None:
    """In a process of its own. A strike kills it."""
    build.start_team = RunTeam if strike is None else struck(strike, kills_driver=True)  # type: ignore[assignment]
    recipe = recipe_from_mapping(tree)
    train(recipe, resume=(Path(recipe.output_dir) / "config.yaml").exists())


@pytest.mark.parametrize("how", ["saved", "drawn_again"])
def test_a_killed_driver_is_resumed(how: str, model: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = CHANGES | {"cluster.max_staleness": 1 if how == "saved" else 2, "checkpoint.batches_ahead": how}
    tree = recipe_tree(model, folder, changes)
    strikes: list[tuple[tuple[int, str, int] | None, int]] = [((TRAINER, "train", 2), -9), ((ENGINE, "submit", 2), -9)]
    if how == "saved":  # weights arrive in place, and those of the run that nobody killed in a second buffer
        tree["cluster"]["weight_buffer"] = "single"
        strikes[0] = (ENGINE, "adopt_weights", 2), -9
    for strike, code in (*strikes, (None, 0)):
        process: multiprocessing.process.BaseProcess = _processes.Process(target=_train, args=(tree, strike))
        process.start()
        process.join(300.0)
        assert process.exitcode == code
    assert drawn_tasks(folder) == drawn_tasks(whole)
    if how == "saved":
        assert_same(folder, whole)
