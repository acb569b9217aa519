"""An evaluation during training leaves no trace in what is trained; a run whose environment mostly fails stops."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.run.evaluate import evaluate
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from octetrl.telemetry.rollout_metrics import FailureShareError
from tests.e2e.tiny_run import read_lines, recipe_tree, run, timeless, tiny_recipe

pytestmark = pytest.mark.usefixtures("rewards_here")

DRAWING = {"environment.kind": "python", "environment.dataset": "tests.e2e.tiny_rewards:drawing_environment"}


def trained(folder: Path) -> dict[str, str]:
    """A digest of the rollouts and of the last checkpoint's files, random states and data order included."""
    last = max((folder / "checkpoints").iterdir())
    files = [path for path in (*(folder / "rollouts").iterdir(), *last.iterdir()) if path.name != "manifest.json"]
    assert len(files) > 5
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without_evaluation(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if "eval" not in name} for line in timeless(lines)]


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16", "trainer.optimizer.master": "stochastic_rounding", "evaluation.temperature": 0.0},
        {"precision": "fp8", "fp8.kv_cache": "dynamic", "engine.prefix_cache": "off", "evaluation.max_new_tokens": 20},
        {"precision": "fp8_full", "engine.kv_cache_tokens": 448, "evaluation.samples": 6},
        {"precision": "fp8", "environment.reward": None, **DRAWING},
    ],
    ids=["rounded by chance", "dynamic", "few pages", "environment that draws"],
)
def test_training_is_the_same_to_the_bit(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    evaluated = {"evaluation.temperature": 1.0, "evaluation.samples": 2, "evaluation.right_from": 0.5, "steps": 2}
    evaluated |= changes
    if evaluated["evaluation.temperature"] == 0:
        evaluated["evaluation.samples"] = 1
    never = run(model, tmp_path / "never", evaluated)
    always = run(model, tmp_path / "always", evaluated | {"evaluation.every": 1})
    assert without_evaluation(always) == without_evaluation(never)
    assert trained(tmp_path / "always") == trained(tmp_path / "never")
    assert all(0 <= line["eval/accuracy_low"] <= line["eval/accuracy"] <= line["eval/accuracy_high"] for line in always)
    assert all(line["time/rollout"] + line["time/train"] <= line["time/step"] for line in always)


def test_metrics_of_an_evaluation(model: Path, tmp_path: Path) -> None:
    changes = {"evaluation.every": 2, "evaluation.temperature": 1.0, "evaluation.samples": 4, "evaluation.k": [1, 4]}
    first, second, _ = run(model, tmp_path / "run", changes | {"environment.reward": None})
    assert not any(name.startswith("eval/") for name in first)
    for name in ("accuracy", "reward_mean", "pass_at_1", "pass_at_4", "maj_at_4", "p90_length", "truncated_share"):
        assert f"eval/{name}" in second
    assert second["eval/tasks"] == 4
    assert second["time/evaluate"] > 0


# --- too many failures --------------------------------------------------------------------------------------


def test_a_run_whose_rewards_mostly_fail_stops(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the step: its line is written and its checkpoint saved, so that it can be looked at and resumed."""
    recipe = tmp_path / "r.yaml"
    changes = {"environment.reward": "tests.e2e.tiny_rewards:always_wrong", "checkpoint.every": 1}
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", changes)))
    assert run_command(["train", str(recipe)]) == 1
    error = capsys.readouterr().err
    assert "octetrl: the run failed: step 1: 8 of 8 rollouts failed in the environment (100%;" in error
    assert "8 x reward_error" in error
    assert error.count("Traceback") == 1 and 'raise RuntimeError("out of order")' in error
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["rollout/failure_share"] == 1.0
    rows = read_lines(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    assert all("tiny_rewards.py" in row["trace"] for row in rows)
    goes_on = ["environment.max_failure_share=1"]
    assert run_command(["train", str(recipe), *goes_on, "--resume"]) == 0
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_below_the_share_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    changes = {"environment.reward": "tests.e2e.tiny_rewards:sometimes_wrong", "rollout.prompts_per_step": 4}
    lines = run(model, tmp_path / "run", changes | {"environment.max_failure_share": 0.95})
    assert len(lines) == 3
    share = [line["rollout/reward_error"] / line["rollout/count"] for line in lines]
    assert share == [line["rollout/failure_share"] for line in lines]
    with pytest.raises(FailureShareError, match="the first failure of each kind"):
        run(model, tmp_path / "other", changes | {"environment.max_failure_share": min(share) - 0.01})


def test_an_evaluation_that_mostly_fails_stops_the_run(model: Path, tmp_path: Path) -> None:
    changes = {
        "environment.reward": "tests.e2e.tiny_rewards:fails_at_length",
        "environment.max_failure_share": 0.2,
        "rollout.max_new_tokens": 4,
        "evaluation.max_new_tokens": 12,
        "evaluation.every": 2,
    }
    with pytest.raises(FailureShareError, match=r"^evaluation after step 2: "):
        train(tiny_recipe(model, tmp_path / "run", changes))
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_without_held_out_tasks_there_is_nothing_to_evaluate_on(model: Path, tmp_path: Path) -> None:
    from octetrl.run.build import build_run

    built = build_run(tiny_recipe(model, tmp_path / "run", {"environment.eval_size": 0}), trains=False)
    try:
        with pytest.raises(UserError, match="eval_size is 0"):
            evaluate(built)
    finally:
        built.close()
