"""Rewards that fail in a real run are counted and left out: never a 0, never in a sibling's baseline. A run that trains
nothing ends with the reason."""

from __future__ import annotations

import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import octetrl
from octetrl.cli.main import run_command
from octetrl.config.load import dump_recipe
from octetrl.run.loop import train
from octetrl.system.errors import RunFailed
from octetrl.telemetry.report_data import raised_warnings, read_run
from tests.e2e.tiny_rewards import NOTES
from tests.e2e.tiny_run import read_lines, recipe_tree, run, tiny_recipe
from tests.unit.environments.judge_double import judge_double

REWARDS = "tests.e2e.tiny_rewards"
NOTHING: dict[str, Any] = {
    "evaluation.every": 1,
    "evaluation.right_from": 0.5,
    "rollout.max_new_tokens": 4,
    "environment.max_failure_share": 1.0,
}
Row = dict[str, Any]


def rollouts(folder: Path, step: int) -> list[list[Row]]:
    """The rows of one step, by group."""
    rows = read_lines(folder / "rollouts" / f"step_{step:06d}.jsonl")
    return [list(group) for _, group in groupby(rows, key=lambda row: row["task_id"])]


def kept_rewards(group: list[Row]) -> list[float]:
    """The rewards of a group that can teach something."""
    rewards = [row["reward"] for row in group if row["reward"] is not None]
    return rewards if len(set(rewards)) > 1 else []


def assert_only_rewards_count(folder: Path, status: str) -> list[Row]:
    """Metrics and batch sizes are those of the rollouts with a reward; returns the rows without one."""
    failed = []
    for line in read_lines(folder / "metrics.jsonl"):
        groups = rollouts(folder, line["step"])
        rows = [row for group in groups for row in group]
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        failed += [row for row in rows if row["status"] == status]
        assert all(row["reward"] is None for row in rows if row["status"] == status)
        assert line[f"rollout/{status}"] == len(rows) - len(rewards)
        assert line["reward/count"] == len(rewards)
        assert line["reward/mean"] == pytest.approx(statistics.fmean(rewards))
        assert line["train/samples"] == sum(len(kept_rewards(group)) for group in groups)
    return failed


def test_a_reward_that_raises_or_is_nan(model: Path, tmp_path: Path) -> None:
    changes = {"environment.reward": f"{REWARDS}:sometimes_wrong", "environment.max_failure_share": 1.0}
    run(model, tmp_path / "run", changes | {"rollout.prompts_per_step": 3})
    failed = assert_only_rewards_count(tmp_path / "run", "reward_error")
    details = [row["detail"] for row in failed]
    assert any("KeyError" in detail and "tiny_rewards.py" in detail for detail in details)
    assert any("the reward is nan, not a finite number" in detail for detail in details)


def test_a_reward_that_hangs(model: Path, tmp_path: Path) -> None:
    hangs = {
        "environment.reward": f"{REWARDS}:sometimes_hangs",
        "environment.reward_timeout_seconds": 0.8,
        "environment.reward_workers": 2,
        "steps": 2,
    }
    run(model, tmp_path / "run", hangs)
    failed = assert_only_rewards_count(tmp_path / "run", "reward_timeout")
    assert failed
    assert all("no reward after 0.8 s" in row["detail"] for row in failed)


def unchanged(folder: Path, model: Path) -> bool:
    """Whether the last checkpoint holds the very weights the run began with."""
    saved = folder / "checkpoints" / "step_000003" / "model.safetensors"
    return saved.read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"environment.reward": f"{REWARDS}:always_wrong"}, {"rollout/reward_error": 8, "reward/count": 0}),
        (
            {"environment.reward": f"{REWARDS}:always_equal"},
            {"reward/zero_variance_fraction": 1.0, "reward/mean": 0.5, "reward/std": 0.0},
        ),
        ({"rollout.max_prompt_tokens": 5}, {"rollout/prompt_too_long": 8, "reward/count": 0}),
        ({"algorithm.overlong": "mask", "rollout.max_new_tokens": 2}, {"rollout/truncated": 8, "reward/count": 8}),
    ],
    ids=["every reward fails", "all rewards equal", "every prompt too long", "every answer masked"],
)
def test_steps_that_teach_nothing(
    changes: dict[str, Any], counted: dict[str, float], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are said, they change nothing, and the run goes on."""
    lines = run(model, tmp_path / "run", NOTHING | changes)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["train/skipped"] == 1.0
        assert line["publish/policy_version"] == 0.0
        assert line.items() >= counted.items()
        assert line.keys().isdisjoint({"loss", "grad_norm", "mismatch/max_abs_diff"})
        assert ("reward/mean" in line) == (line["reward/count"] > 0)
        assert ("eval/accuracy" in line) == (line["reward/count"] > 0)
    said = capsys.readouterr().err
    assert said.count("no update, because ") == 3
    count = lines[0]["reward/count"]
    assert f"({'all' if count == 8 else f'{count} of'} 8 answers were scored" in said or not count
    assert unchanged(tmp_path / "run", model)
    train(tiny_recipe(model, tmp_path / "run", NOTHING | changes | {"steps": 4}), resume=True)
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 4


def test_groups_without_variance_may_be_kept(model: Path, tmp_path: Path) -> None:
    changes = {"environment.reward": f"{REWARDS}:always_equal", "algorithm.drop_zero_variance": False}
    lines = run(model, tmp_path / "run", changes)
    assert [line["loss"] for line in lines] == [0.0] * 3
    assert [line["train/samples"] for line in lines] == [8.0] * 3
    assert unchanged(tmp_path / "run", model)


def test_the_dataset_scores_by_itself(model: Path, tmp_path: Path) -> None:
    """chain_sum's own scorer finds nothing right in noise, and says so with a number."""
    sums = {"environment.kind": "reasoning_gym", "environment.dataset": "chain_sum", "environment.reward": None}
    line = run(model, tmp_path / "run", {**sums, "steps": 1})[0]
    assert line["reward/count"] == 8
    assert line["reward/mean"] < 0.5


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


def failing(model: Path, folder: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(RunFailed) as error:
        run(model, folder, {"rollout.max_new_tokens": 4, "failures.max_empty_steps": 3, "steps": 6} | changes)
    return str(error.value)


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


def test_rewards_of_several_environments_keep_their_functions_apart(model: Path, tmp_path: Path) -> None:
    """Names that differ by a hyphen, one function twice in a list, functions of groups, and evaluation."""

    def one(task: octetrl.Task, text: str) -> float:
        return 1.0

    def two(task: octetrl.Task, text: str) -> float:
        return 2.0

    def third(task: octetrl.Task, texts: list[str]) -> list[float]:
        return [float(place) for place, _ in enumerate(texts)]

    tasks = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
    other = [{"prompt": f"{a} + 2 =", "answer": str(a + 2)} for a in range(8)]
    fields = recipe_tree(model, tmp_path / "run", {"steps": 2, "evaluation.every": 2})
    del fields["environment"]
    finished = octetrl.train(
        **fields,
        environments={
            "a-b": {"tasks": tasks, "reward": {"a-b": one, "ab": two}, "eval_size": 2},
            "ab": {"tasks": other, "reward": [two, two, one], "eval_size": 2},
            "c": {
                "tasks": other[4:],
                "reward": {"g": {"function": third, "of": "group", "weight": 0.5}},
                "eval_size": 0,
            },
        },
    )
    lines = [line for path in sorted((finished.folder / "rollouts").iterdir()) for line in read_lines(path)]
    by_environment = {
        name: [line for line in lines if line["task_id"].startswith(f"{name}/")] for name in ("a-b", "ab")
    }
    assert all(line["components"] == {"a-b": 1.0, "ab": 2.0} for line in by_environment["a-b"])
    assert all(line["components"] == {"two": 2.0, "two_2": 2.0, "one": 1.0} for line in by_environment["ab"])
    grouped = [line for line in lines if line["task_id"].startswith("c/")]
    assert all(line["reward"] == 0.5 * line["sibling"] == 0.5 * line["components"]["g"] for line in grouped)
    assert all(by_environment.values()) and grouped
    evaluated = read_lines(next((finished.folder / "evaluations").iterdir()))
    assert {line["reward"] for line in evaluated} == {3.0, 5.0}


def test_a_group_reward_that_is_not_there_is_refused_before_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    for name in ("nobody", "NOTES"):
        reward = {"g": {"function": f"tests.e2e.tiny_rewards:{name}", "of": "group"}}
        recipe.write_text(dump_recipe(tiny_recipe(model, tmp_path / "run", {"environment.reward": reward})))
        assert run_command(["check", str(recipe)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and name in err
