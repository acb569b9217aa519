"""Runs of a report are compared in reward and accuracy only if their tasks and scores are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from octetrl.telemetry.report import report_page, terminal_report
from octetrl.telemetry.report_data import OF_PAIRS, RunRecord, changed_tasks

TASKS = {"kind": "reasoning_gym", "dataset": "chain_sum"}
SAYS = "the tasks differ: rewards and accuracies cannot be compared"


def run_of(name: str, reward: float = 0.5, **recipe: object) -> RunRecord:
    rows = [
        {"step": step, "reward/mean": reward + step / 100, "eval/accuracy": reward, "time/step": 30.0 + reward}
        for step in range(1, 13)
    ]
    return RunRecord(Path(name), recipe, rows)


def test_rewards_of_the_same_tasks_are_compared() -> None:
    limits = {"reward_timeout_seconds": 2.0, "reward_workers": 4, "seed": 3, "eval_size": 64}
    one, two = run_of("one", environment=TASKS), run_of("two", 0.75, environment={**TASKS, **limits})
    assert changed_tasks(one, two) == []
    lines, page = list(terminal_report([one, two])), report_page([one, two])
    assert "reward, step by step, two − one: +0.25, the same in all 6 pairs" in lines, "no interval of width 0"
    two.rows[-1]["reward/mean"] = 1.5
    (varied,) = (line for line in terminal_report([one, two]) if line.startswith("reward, step by step"))
    assert ", 95% interval +0.2689 to +0.605" in varied, "Wilson's, of one pair in six"
    assert OF_PAIRS in " ".join(" ".join(lines).split()) and OF_PAIRS in page, "which pairs, in both"
    assert "bootstrap" not in " ".join(terminal_report([one]))
    assert not any(SAYS in line for line in lines) and SAYS not in page
    assert "<td>reward, step by step</td>" in page and "<td>held-out accuracy, step by step</td>" in page


def test_rewards_of_other_tasks_are_not() -> None:
    one, two = run_of("one", environment=TASKS), run_of("two", 0.75, environment={**TASKS, "dataset": "gcd"})
    lines, page = list(terminal_report([one, two])), report_page([one, two])
    assert f"{SAYS} (environment.dataset)" in lines and f"{SAYS} (environment.dataset)" in page
    assert not any(line.startswith(("reward,", "held-out")) for line in lines)
    assert "reward, step by step" not in page and "accuracy, step by step" not in page
    assert any(line.startswith("seconds of a step, step by step, two − one") for line in lines)
    third = run_of("three", environment=TASKS)
    lines = list(terminal_report([one, two, third]))
    assert f"one and two: {SAYS} (environment.dataset)" in lines
    mixed = run_of("mixed", environments={"sums": TASKS})
    said = [line for line in terminal_report([one, mixed]) if "tasks differ" in line or " more)" in line]
    assert said[0].startswith(SAYS) and said[-1].endswith(" more)") and max(map(len, said)) <= 100
    rewards = next(line for line in lines if line.startswith("reward,"))
    assert rewards.startswith("reward, step by step, three − one")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": {**TASKS, "reward": "mine:score"}}, "environment.reward"),
        ({"environment": {**TASKS, "parameters": {"max_terms": 9}}}, "environment.parameters"),
        ({"environment": TASKS, "evaluation": {"right_from": 0.5}}, "evaluation.right_from"),
        ({"environment": {}, "environments": {"sums": TASKS}}, "environments.sums.kind"),
    ],
)
def test_whatever_defines_tasks_or_score_counts(changes: dict[str, object], field: str) -> None:
    assert field in changed_tasks(run_of("one", environment=TASKS), run_of("two", **changes))
