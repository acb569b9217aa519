"""A resumed run makes the drafts of a run that was never stopped, and says which earlier answers it could not read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from octetrl.run.loop import train
from tests.e2e.tiny_run import read_lines, run, timeless, tiny_recipe

TASKS = Path(__file__).with_name("sums.jsonl")
DRAFTED: dict[str, Any] = {
    "engine.speculation": {"name": "ngram", "ngrams": [2, 1], "min_gain": 0.0, "max_draft_tokens": 3},
    "engine.max_batch": 32,
    "environment.eval_size": 1,
    "evaluation.every": 1,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 4,
    "steps": 4,
}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that meets two tasks again and again."""
    folder = tmp_path_factory.mktemp("drafted")
    (folder / "tasks.jsonl").write_text("".join(TASKS.read_text().splitlines(keepends=True)[1:4]))
    run(model, folder / "run", DRAFTED | {"environment.dataset": str(folder / "tasks.jsonl")})
    return folder / "run"


def resumed(model: Path, whole: Path, folder: Path, drafted: dict[str, Any] = DRAFTED) -> list[dict[str, Any]]:
    """The metrics of a run that goes on from step 3 of `whole`, with the rollouts and evaluations that it finds."""
    shutil.rmtree(folder / "checkpoints/step_000004")
    changes = drafted | {"environment.dataset": str(whole.parent / "tasks.jsonl")}
    train(tiny_recipe(model, folder, changes), resume=True)
    drawn = [[row["token_ids"] for row in read_lines(one / "rollouts/step_000004.jsonl")] for one in (folder, whole)]
    assert drawn[0] == drawn[1]
    return timeless(read_lines(folder / "metrics.jsonl"))


def test_a_resumed_run_makes_the_same_drafts(model: Path, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    metrics = resumed(model, whole, tmp_path / "run")
    assert metrics == timeless(read_lines(whole / "metrics.jsonl"))
    assert metrics[-1]["rollout/drafted_tokens"] > 0


def test_answers_that_cannot_be_read_are_named(
    model: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = shutil.copytree(whole, tmp_path / "run") / "rollouts"
    (rollouts / "step_000001.jsonl").unlink()
    (rollouts / "step_000003.jsonl").write_text("{")
    metrics = resumed(model, whole, tmp_path / "run")
    assert metrics[-1] != timeless(read_lines(whole / "metrics.jsonl"))[-1], "fewer answers, other drafts"
    said = capsys.readouterr().err
    assert f"{rollouts} has no rollouts of step 1: no drafts are made from their answers" in said
    assert f"{rollouts / 'step_000003.jsonl'}, line 1: " in said and "no drafts are made from its answers" in said
