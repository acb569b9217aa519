"""A run that trains nothing ends with exit code 1 and the reason, instead of doing nothing until its last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.cli.main import run_command
from octetrl.config.load import dump_recipe
from octetrl.system.errors import RunFailed
from octetrl.telemetry.report_data import raised_warnings, read_run
from tests.e2e.tiny_rewards import NOTES
from tests.e2e.tiny_run import read_lines, run, tiny_recipe

REWARDS = "tests.e2e.tiny_rewards"


def failing(model: Path, folder: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(RunFailed) as error:
        run(model, folder, {"rollout.max_new_tokens": 4, "failures.max_empty_steps": 3, "steps": 6} | changes)
    return str(error.value)


def test_every_prompt_too_long(model: Path, tmp_path: Path) -> None:
    text = failing(model, tmp_path / "run", {"rollout.max_prompt_tokens": 5})
    assert text.startswith("step 1 has no trained token: every prompt has more than 5 tokens")
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["rollout/too_long_share"] == 1.0


def test_every_reward_equal_is_no_missing_reward(model: Path, tmp_path: Path) -> None:
    text = failing(model, tmp_path / "run", {"environment.reward": f"{REWARDS}:always_equal"})
    assert text.startswith("3 steps in a row have no trained token (failures.max_empty_steps)")
    assert "the rewards are equal within every group (all 8 answers were scored; mean reward 0.5)" in text
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [1, 2, 3]
    left = read_run(tmp_path / "run")
    assert [step for step, _ in left.warnings] == [1, 2, 3] and left.where["commit"] and left.where["machine"]
    (raised,) = raised_warnings(left)
    assert raised.startswith("no update, because the rewards are equal within every group")
    assert raised.endswith("(after step 1, 3 times until step 3)")


def test_a_score_that_hangs_is_not_waited_for_once_per_rollout(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path / "notes"))
    hangs = {
        "environment.reward": f"{REWARDS}:always_hangs",
        "environment.reward_timeout_seconds": 1.5,
        "rollout.prompts_per_step": 8,
        "environment.reward_workers": 4,
    }
    text = failing(model, tmp_path / "run", hangs)
    assert "step 1: 32 of 32 rollouts failed in the environment" in text
    assert "reward_timeout" in text and "no reward after 1.5 s" in text
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["rollout/reward_timeout"] == 32
    assert len((tmp_path / "notes").read_text().splitlines()) < 2 / 3 * 32, "it waited for all 32"
    assert line["time/reward"] > 1.0 and 1.4 < line["time/reward_slowest"] < 60.0


def test_check_draws_answers_and_shows_their_rewards(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(dump_recipe(tiny_recipe(model, tmp_path / "run")))
    assert run_command(["check", str(recipe), "--sample", "2"]) == 0
    shown = capsys.readouterr().out
    assert "sample of 2" in shown and shown.count("     answer     ") == 2 and shown.count(": reward 0.") == 2
    assert shown.rstrip().endswith("no problems") and not (tmp_path / "run").exists()
    assert run_command(["check", str(recipe), "--sample", "2", "--memory-gib", "80"]) == 2
    assert "--sample: it draws answers on this machine" in capsys.readouterr().err


LACKING = """
from octetrl import Task
from octetrl.environments.trl_rewards import trl_reward

def by_ids(completions, completion_ids, **columns):
    return [1.0]

class LackingColumns:
    tasks = [Task(id=f"{n}+1", prompt=f"{n} + 1 =", answer=str(n + 1)) for n in range(100)]
    right = trl_reward(by_ids)
"""


def test_a_sample_without_any_reward_is_a_problem(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a sample nobody calls a reward that takes a whole conversation."""
    (tmp_path / "lacking_columns.py").write_text(LACKING)
    recipe = tmp_path / "r.yaml"
    named = {"environment.kind": "python", "environment.dataset": "lacking_columns:LackingColumns"}
    recipe.write_text(dump_recipe(tiny_recipe(model, tmp_path / "run", named | {"environment.reward": None})))
    assert run_command(["check", str(recipe)]) == 0
    assert run_command(["check", str(recipe), "--sample", "2"]) == 2
    shown = capsys.readouterr()
    assert "needs the column 'completion_ids', which the task does not have" in shown.out
    assert "none of 2 sampled answers has a reward (2 reward_error); a run would end at its first step" in shown.err
