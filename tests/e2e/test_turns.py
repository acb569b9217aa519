"""Runs whose environments answer: the trainer sees what the engine drew, whatever the environments do and when."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octetrl.cli.main import run_command
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.telemetry.rollout_metrics import FailureShareError
from tests.e2e.tiny_run import read_lines, run, timeless, tiny_recipe

TALK: dict[str, Any] = {
    "environment.kind": "python",
    "environment.dataset": "tests.e2e.tiny_turns:Talk",
    "environment.reward": None,
    "rollout.stop": ["e", "a", "1"],  # so that noise has an end before it is cut
}
UNTIMED = {"rollout/waiting_share", "rollout/in_flight", "rollout/with_environment", "rollout/batch_occupancy"}
UNTIMED |= {"rollout/cache_occupancy", "rollout/prefilled_tokens", "rollout/idle_share", "rollout/preemptions"}


def talk(name: str, **changes: Any) -> dict[str, Any]:
    return {**TALK, "environment.dataset": f"tests.e2e.tiny_turns:{name}", **changes}


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in UNTIMED} for line in timeless(lines)]


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run in fp8_full whose environments answer at once. To be read, not written."""
    folder = tmp_path_factory.mktemp("talk") / "run"
    run(model, folder, TALK)
    return folder


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_the_trainer_sees_what_the_engine_drew(precision: str, plain: Path, model: Path, tmp_path: Path) -> None:
    if precision == "fp8_full":
        lines = read_lines(plain / "metrics.jsonl")
    else:
        lines = run(model, tmp_path / "run", TALK | {"precision": precision})
    assert [line["mismatch/max_abs_diff"] for line in lines] == [0.0] * 3
    assert max(line["environment/turns"] for line in lines) > 1.5
    assert all(line["grad_norm"] > 0 for line in lines)
    for line in lines:
        assert line["reward/mean"] == pytest.approx(
            line["reward/component/noise"] + 0.1 * line["reward/component/brief"]
        )
        assert 0 < line["rollout/waiting_share"] < 1 and line["rollout/in_flight"] > 1
        assert line["environment/letters"] > 0


def test_a_changed_history_begins_a_sample_and_no_rollout_weighs_more(model: Path, tmp_path: Path) -> None:
    changes = {"rollout.history": "template", "algorithm.token_weighting": "sequence", "steps": 1}
    (line,) = run(model, tmp_path / "run", talk("EditedTalk", **changes))
    assert line["mismatch/max_abs_diff"] == 0.0 and line["grad_norm"] > 0
    assert 1.2 < line["rollout/segments"] < 3
    assert line["train/samples"] == round(line["rollout/segments"] * line["rollout/count"])
    rows = read_lines(tmp_path / "run/rollouts/step_000001.jsonl")
    forks = [turn for row in rows for turn in row.get("turns", []) if turn.get("is_fork")]
    assert len(forks) == line["train/samples"] - line["rollout/count"]
    assert line["train/trained_tokens"] == sum(len(row["token_ids"]) for row in rows)


def test_when_environments_answer_changes_nothing(plain: Path, model: Path, tmp_path: Path) -> None:
    quick = read_lines(plain / "metrics.jsonl")
    slow = run(model, tmp_path / "slow", talk("SlowTalk", **{"environment.turns": {"max_in_flight": 4}}))
    for step in (1, 2, 3):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (plain / name).read_bytes() == (tmp_path / "slow" / name).read_bytes()
    assert untimed(quick) == untimed(slow)


def test_rollouts_show_turns_components_and_failures(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    lines = run(model, folder, talk("FlakyTalk", **{"rollout.prompts_per_step": 4, "steps": 2}))
    rows = [row for step in (1, 2) for row in read_lines(folder / "rollouts" / f"step_{step:06d}.jsonl")]
    assert len(rows) == 32
    failed = [row for row in rows if row["status"] == "environment_error"]
    assert failed and sum(line["rollout/environment_error"] for line in lines) == len(failed)
    for row in failed:
        assert row["reward"] is None and "ConnectionError: the game is gone" in row["detail"]
        assert "tiny_turns.py" in row["trace"]
    for row in rows:
        assert row["reward"] is None or set(row["components"]) == {"noise", "brief"}
        for turn, following in pairwise(row.get("turns", [])):
            assert [reply["role"] for reply in turn["replies"]] == ["user"] and following["prompt_token_ids"]
    capsys.readouterr()
    assert run_command(["rollouts", str(folder), "--status", "environment_error"]) == 0
    shown = capsys.readouterr().out
    assert "environment_error" in shown and "user: and 1?" in shown and "letters" in shown


def test_too_many_failures_stop_the_run(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FailureShareError, match="5 x environment_error") as stopped:
        run(model, tmp_path / "run", talk("BrokenTalk"))
    assert 'raise ConnectionError("the game is gone")' in str(stopped.value)


def test_a_score_in_a_process_of_its_own_and_a_reward_instead(model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "scored", talk("ScoredTalk", steps=1))
    assert all(line["reward/count"] == 8 and "reward/component/score" not in line for line in lines)
    other = talk("Talk", **{"environment.reward": "tests.e2e.tiny_rewards:by_text", "steps": 1})
    for line in run(model, tmp_path / "instead", other):
        assert 0 < line["reward/mean"] < 1  # which `brief` would pull far below
        assert line["environment/brief"] < 0  # a metric now
        assert "reward/component/brief" not in line


def test_an_evaluation_speaks_by_turns_too(plain: Path, model: Path, tmp_path: Path) -> None:
    changes = talk("Talk", **{"evaluation.every": 1, "evaluation.right_from": 0.3})
    evaluated = run(model, tmp_path / "evaluated", changes)
    assert all("eval/accuracy" in line and "eval/environment_error" in line for line in evaluated)
    without = [{name: line[name] for name in line if not name.startswith("eval/")} for line in evaluated]
    assert untimed(without) == untimed(read_lines(plain / "metrics.jsonl"))
    report = evaluate_checkpoint(str(tmp_path / "evaluated"), tiny_recipe(model, tmp_path / "other", changes))
    assert report.accuracy == evaluated[-1]["eval/accuracy"]
    assert all(len(rollout.turns) >= 1 for group in report.groups for rollout in group.rollouts)


def test_a_run_goes_on_where_it_was_left(model: Path, tmp_path: Path) -> None:
    from octetrl.run.loop import train

    run(model, tmp_path / "whole", talk("FlakyTalk", **{"checkpoint.every": 1}))
    run(model, tmp_path / "cut", talk("FlakyTalk", **{"checkpoint.every": 1, "steps": 2}))
    train(tiny_recipe(model, tmp_path / "cut", talk("FlakyTalk", **{"checkpoint.every": 1})), resume=True)
    whole, cut = (untimed(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut"))
    assert json.dumps(whole) == json.dumps(cut)
