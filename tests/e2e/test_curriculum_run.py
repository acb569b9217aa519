"""Runs whose tasks are drawn by their pass rates: cut off and resumed, also while batches are generated ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octetrl.run.loop import one_step, train
from octetrl.run.resume import Cursor, batches_from_json, batches_to_bytes
from octetrl.telemetry.glossary import explained
from tests.e2e.tiny_run import RECIPE, read_lines, run, timeless, tiny_recipe
from tests.unit.workers.thread_team import run_on

pytestmark = pytest.mark.usefixtures("rewards_here")


@pytest.fixture
def changes(tmp_path: Path) -> dict[str, Any]:
    """Five tasks, so that the later steps draw some again, and others rest."""
    rows = Path(RECIPE["environment"]["dataset"]).read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(rows[:5]))
    curriculum = {"pass_rate": [0.3, 0.6], "unseen": 0.5, "retry_hard": 0.1}
    return {
        "environment.dataset": str(tmp_path / "few.jsonl"),
        "environment.curriculum": curriculum,
        "environment.eval_size": 0,
        **{"evaluation.right_from": 0.5, "precision": "bf16", "rollout.max_new_tokens": 3, "steps": 5},
    }


def drawn(folder: Path, steps: int) -> list[list[str]]:
    files = [folder / "rollouts" / f"step_{step:06d}.jsonl" for step in range(1, steps + 1)]
    return [list(dict.fromkeys(row["task_id"] for row in read_lines(file))) for file in files]


def test_a_resumed_run_draws_the_same_tasks(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole", changes)
    train(tiny_recipe(model, tmp_path / "cut", changes | {"steps": 3}))
    train(tiny_recipe(model, tmp_path / "cut", changes), resume=True)
    assert drawn(tmp_path / "cut", 5) == drawn(tmp_path / "whole", 5)
    assert timeless(read_lines(tmp_path / "cut" / "metrics.jsonl")) == timeless(whole)
    assert any(0 < line["curriculum/resting_share"] < 1 for line in whole) and whole[-1]["curriculum/unseen"] == 0
    names = [name for name in whole[-1] if name.startswith("curriculum/")]
    assert len(names) == 6 and all(map(explained, names))


def test_batches_ahead_are_drawn_by_the_results_of_those_before(
    changes: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Without an update (`lr` is 0) the resumed run has the weights of the whole one."""
    changes |= {"trainer.optimizer.lr": 0.0}
    with run_on(1, model, tmp_path, **changes) as plain:
        expected = [one_step(plain, step).groups for step in range(1, 6)]
    with run_on(1, model, tmp_path, engines=1, ahead=1, **changes) as cut:
        first = [one_step(cut, step).groups for step in (1, 2, 3)]
        batches = cut.method.batches_after(3, waits=True)
        cursor = json.loads(json.dumps(Cursor.of(cut, 3).as_json()))
        content = json.loads(batches_to_bytes(batches))
    with run_on(1, model, tmp_path, engines=1, ahead=1, **changes) as resumed:
        Cursor(**cursor).put_into(resumed, has_changed=False)
        resumed.workers.policy_version = cursor["policy_version"]
        resumed.method.put_back(resumed, batches_from_json(content), 3)
        rest = [one_step(resumed, step).groups for step in range(4, 6)]
    ids = [[group.task.id for group in groups] for groups in (*first, *rest)]
    assert ids == [[group.task.id for group in groups] for groups in expected]
