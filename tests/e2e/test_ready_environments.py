"""Environments that a recipe names, in whole runs: a game of several turns, and a judge behind an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.tiny_run import read_lines, run
from tests.unit.environments.judge_double import judge_double


def test_a_game_is_played_in_turns(model: Path, tmp_path: Path) -> None:
    changes = {
        "environment.kind": "game",
        "environment.dataset": "guess_number",
        "environment.parameters": {"numbers": 3, "guesses": 3, "starts": 5},
        "environment.reward": None,
        "model.context_length": 1024,
        "rollout.max_prompt_tokens": 300,
        "rollout.max_new_tokens": 8,
        "rollout.stop": ["1", "e"],
        "trainer.tokens_per_micro_batch": 1024,
        "algorithm.drop_zero_variance": False,
        "steps": 1,
    }
    (line,) = run(model, tmp_path / "run", changes)
    rows = read_lines(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    assert len(rows) == 8 and all(row["task_id"].startswith("guess_number/") for row in rows)
    assert {row["status"] for row in rows} <= {"scored", "truncated"}
    assert all(set(row["components"]) == {"found", "quickness"} for row in rows if row["status"] == "scored")
    assert 1 <= line["environment/guesses_made"] <= 3


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
