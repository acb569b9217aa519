"""Evaluation on files of their own, before the first step, and with rewards that training never calls."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import octetrl
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.loop import train
from octetrl.run.recipe_files import unknown_metric
from octetrl.telemetry.glossary import explained
from octetrl.telemetry.report_data import read_run
from tests.e2e.tiny_run import RECIPE, read_lines, run, timeless, tiny_recipe

pytestmark = pytest.mark.usefixtures("rewards_here")
BY_TEXT = "tests.e2e.tiny_rewards:by_text"
REWARDS = {
    "noise": {"function": BY_TEXT},
    "shaping": {"function": "tests.e2e.tiny_rewards:always_equal", "only": "training", "weight": 2.0},
    "watched": {"function": "tests.e2e.tiny_rewards:always_equal", "only": "evaluation"},
}


def sets(folder: Path) -> dict[str, Any]:
    """Two files: one shares 3 prompts with the training tasks, the other has its own columns."""
    rows = read_lines(Path(RECIPE["environment"]["dataset"]))
    own = [{"question": f"{n} + {n} =", "solution": str(2 * n)} for n in range(5)]
    for name, content in {"seen": rows[:3], "own": own}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {
        "seen": {"dataset": str(folder / "seen.jsonl")},
        "own": {
            "dataset": str(folder / "own.jsonl"),
            "columns": {"prompt": "question", "answer": "solution"},
            **{"size": 4, "samples": 2, "temperature": 1.0, "k": [2], "max_new_tokens": 8},
        },
    }


def test_each_set_has_its_metrics_and_training_its_rewards(model: Path, tmp_path: Path) -> None:
    changes = {
        "environment.eval_dataset": sets(tmp_path),
        "environment.reward": REWARDS,
        **{
            "evaluation.every": 1,
            "evaluation.on_start": True,
            "precision": "bf16",
            "steps": 2,
            "rollout.max_new_tokens": 4,
        },
    }
    start, first, second = run(model, tmp_path / "run", changes)
    assert [start["step"], first["step"], second["step"]] == [0, 1, 2] and "loss" not in start
    recipe = tiny_recipe(model, tmp_path / "run", changes)
    for line in (start, first, second):
        assert (line["eval/tasks"], line["eval/seen/tasks"], line["eval/own/tasks"]) == (7, 3, 4)
        assert line["eval/accuracy"] == pytest.approx(
            (3 * line["eval/seen/accuracy"] + 4 * line["eval/own/accuracy"]) / 7
        )
        assert "eval/own/pass_at_2" in line and "eval/seen/pass_at_2" not in line
        assert line["eval/component/watched"] == line["eval/own/component/watched"] == 0.5
        assert line["eval/component/noise"] != 0 and "eval/component/shaping" not in line
        assert line["eval/seen/reward_mean"] == line["eval/seen/component/noise"]  # neither of the others is in it
        for metric in (name for name in line if name.startswith("eval/")):
            assert explained(metric) is not None
            changed = {"early_stopping": {"metric": metric}}
            assert not list(unknown_metric(tiny_recipe(model, tmp_path / "x", changes | changed)))
    assert first["reward/mean"] == pytest.approx(first["reward/component/noise"] + 2 * 0.5)
    assert "reward/component/watched" not in first

    trained = [row for step in (1, 2) for row in read_lines(tmp_path / f"run/rollouts/step_{step:06d}.jsonl")]
    evaluated = read_lines(tmp_path / "run/evaluations/step_000000.jsonl")
    assert not {row["prompt"] for row in trained} & {row["prompt"] for row in evaluated}
    assert {row["task_id"].partition("/")[0] for row in evaluated} == {"seen", "own"} and len(evaluated) == 3 + 2 * 4
    everything = evaluate_checkpoint(str(tmp_path / "run"), recipe, all_tasks=True)
    assert {name: one.tasks for name, one in everything.sets.items()} == {"seen": 3, "own": 5}
    seen = everything.sets["seen"].numbers  # all its tasks were evaluated before, too
    assert {f"eval/seen/{key}": value for key, value in seen.items()}.items() <= second.items()
    assert ("steps", "2 of 2") in read_run(tmp_path / "run").settings


def test_the_evaluation_at_the_start_changes_nothing_after_it(model: Path, tmp_path: Path) -> None:
    """Neither of a whole run nor of one that is resumed, whose file keeps the line of step 0."""
    changes: dict[str, Any] = {"precision": "fp8_full", "checkpoint.every": 1, "steps": 2, "rollout.max_new_tokens": 4}
    plain = run(model, tmp_path / "plain", changes)
    whole = run(model, tmp_path / "whole", changes | {"evaluation.on_start": True})
    cut = changes | {"evaluation.on_start": True}
    train(tiny_recipe(model, tmp_path / "cut", cut | {"steps": 1}))
    train(tiny_recipe(model, tmp_path / "cut", cut), resume=True)
    assert timeless(whole)[1:] == timeless(plain)
    assert timeless(read_lines(tmp_path / "cut/metrics.jsonl")) == timeless(whole)


@pytest.mark.parametrize(
    ("metric", "is_measured"),
    [
        ("eval/own/accuracy", True),
        ("eval/own/pass_at_2", True),
        ("eval/component/watched", True),
        ("eval/reward_error", True),
        ("eval/p90_length", True),
        ("eval/anything", False),
        ("eval/seen/pass_at_2", False),
        ("eval/other/accuracy", False),
        ("eval/component/shaping", False),
        ("eval/environments/own/accuracy", False),
        ("eval/mean_of_environments", False),
        ("reward/mean", True),
    ],
)
def test_what_a_run_can_be_judged_by(metric: str, is_measured: bool, model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"environment.eval_dataset": sets(tmp_path), "environment.reward": REWARDS}
    changes |= {"evaluation.every": 1}
    for field in (
        {"early_stopping": {"metric": metric}},
        {"checkpoint.best_metric": metric, "checkpoint.keep_best": 1},
    ):
        problems = list(unknown_metric(tiny_recipe(model, tmp_path / "run", changes | field)))
        assert bool(problems) is not is_measured and all("\n" not in problem for problem in problems)


def test_a_file_of_held_out_tasks_is_a_single_set(model: Path, tmp_path: Path) -> None:
    changes = {"environment.eval_dataset": sets(tmp_path)["seen"]["dataset"], "evaluation.every": 2, "steps": 2}
    _, line = run(model, tmp_path / "run", changes)
    rows = read_lines(tmp_path / "run/evaluations/step_000002.jsonl")
    assert line["eval/tasks"] == len(rows) == 3 and not any(name.startswith("eval/seen") for name in line)
    assert line["eval/reward_mean"] == pytest.approx(statistics.fmean(row["reward"] for row in rows))


def test_held_out_tasks_of_python(model: Path, tmp_path: Path) -> None:
    """Lists beside a list, by name; what does not go together is refused before anything is written."""
    tasks = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
    eval_tasks = {"seen": tasks[:2], "new": [octetrl.Task("x", "9 + 9 =", "18")]}
    sections = {name: RECIPE[name] for name in ("rollout", "engine", "trainer", "checkpoint", "cluster", "logging")}
    fields: Any = {"model": {"path": str(model), "context_length": 128}, "steps": 1, **sections}
    fields |= {"output_dir": tmp_path / "run", "evaluation": {"every": 1}, "failures": {"max_empty_steps": 0}}
    stopping = octetrl.EarlyStopping("eval/new/accuracy")
    run = octetrl.train(tasks=tasks, eval_tasks=eval_tasks, callbacks=stopping, **fields)
    (line,) = run.metrics
    assert (line["eval/tasks"], line["eval/seen/tasks"], line["eval/new/tasks"]) == (3, 2, 1)
    assert not {row["prompt"] for row in run.rollouts()} & {"0 + 1 =", "1 + 1 ="}
    assert {name: report.tasks for name, report in run.evaluate().sets.items()} == {"seen": 2, "new": 1}
    for wrong in (
        {"tasks": "tasks.jsonl", "eval_tasks": tasks},
        {"tasks": tasks, "eval_tasks": [{"prompt": "2 + 2 ="}]},
        {"tasks": tasks, "eval_tasks": {"A set": tasks}},
        {"tasks": tasks, "eval_tasks": 3},
    ):
        with pytest.raises(octetrl.UserError, match="eval_tasks"):
            octetrl.train(**wrong, **(fields | {"output_dir": tmp_path / "other"}))
        assert not (tmp_path / "other" / "config.yaml").exists()
