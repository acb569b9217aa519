"""Groups of workers that share one model draw and measure what one worker does that has it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.records import GenerationRequest, SamplingParams
from tests.e2e.test_turns import TALK
from tests.unit.workers.thread_team import assert_same_measures, run_on, steps_of, team_of


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"steps": 1}, 4),
        ({**TALK, "rollout.prompts_per_step": 2, "precision": "bf16", "trainer.optimizer.lr": 0.0, "steps": 2}, 2),
    ],
    ids=["learning", "conversations"],
)
def test_groups_draw_and_measure_the_same(changes: dict[str, Any], count: int, model: Path, tmp_path: Path) -> None:
    changes = changes | {"trainer.tokens_per_micro_batch": 64}
    with run_on(0, model, tmp_path, **changes) as run:
        expected, lines = steps_of(run, changes["steps"])
    with run_on(count, model, tmp_path, size=2, **changes) as run:
        drawn, shared = steps_of(run, changes["steps"])
        team = team_of(run)
    assert drawn == expected
    for line, mine in zip(lines, shared, strict=True):
        assert_same_measures(mine, line)
        assert mine["mismatch/max_abs_diff"] == 0.0
    assert {worker for worker, verb in team.begun if verb == "submit"} == set(range(0, count, 2)), (
        "only leaders are asked"
    )


def test_a_cancelled_request_leaves_the_group_in_step(model: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=30, ignore_eos=True)
    with run_on(2, model, tmp_path, size=2, precision="bf16") as run, run.workers.session() as session:
        for name in ("kept", "cancelled"):
            session.submit(GenerationRequest(name, (5, 6, 7), sampling, 2))
        session.events(0.05)
        session.cancel("cancelled")
        found = []
        while session.has_work:
            found += [event for event in session.events(1.0) if event.completion is not None]
        assert [event.request_id for event in found] == ["kept", "kept"]
        assert all(len(event.completion.token_ids) == 30 for event in found)
