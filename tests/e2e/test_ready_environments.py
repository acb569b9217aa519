"""Environments that a recipe names, in whole runs: a judge behind an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.tiny_run import read_lines, run
from tests.unit.environments.judge_double import judge_double


def test_a_judge_scores_and_what_it_fails_has_no_reward(model: Path, tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> str:
        question = body["messages"][0]["content"]
        return "I can't say." if len(question) % 4 == 0 else f"Score: {len(question) % 11}"

    with judge_double(reply) as double:
        changes = {
            "environment.reward": None,
            "environment.judge": {"base_url": double.url, "model": "judge", "concurrency": 4},
            "environment.max_failure_share": 1.0,
            "rollout.prompts_per_step": 4,
            "steps": 2,
        }
        lines = run(model, tmp_path / "run", changes)
    rows = [row for step in (1, 2) for row in read_lines(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")]
    failed = [row for row in rows if row["status"] == "reward_error"]
    assert 0 < len(failed) < len(rows) == 32
    assert all(row["reward"] is None and "no score in the reply" in row["detail"] for row in failed)
    assert sum(line["rollout/reward_error"] for line in lines) == len(failed)
    assert all(body["messages"][0]["content"].count("Answer to grade:") == 1 for _, body, _ in double.asked)
