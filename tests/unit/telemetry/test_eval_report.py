"""A report's numbers, counted by hand; what has no reward is neither right nor wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from octetrl.cli.eval import report_table
from octetrl.records import METRIC_NAME as NAME
from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.telemetry.eval_report import EvalReport, Scoring, differences


def rollout(task: Task, reward: float | None, answered: str | None = None, length: int = 2) -> Rollout:
    finish = FinishReason.LENGTH if length > 9 else FinishReason.STOP
    completion = Completion((5,) * length, (-0.1,) * length, "text", finish, 0, "digest")
    ended = RolloutStatus.TRUNCATED if finish is FinishReason.LENGTH else RolloutStatus.SCORED
    status = RolloutStatus.REWARD_ERROR if reward is None else ended
    return Rollout(task, (Turn((1,), completion),), status, reward, answered=answered)


def group(name: str, *outcomes: tuple[float | None, str | None], length: int = 2) -> RolloutGroup:
    task = Task(name, f"prompt of {name}")
    return RolloutGroup(task, tuple(rollout(task, reward, answer, length) for reward, answer in outcomes))


GROUPS = [
    group("a", (1.0, "7"), (0.0, "8"), (1.0, "7"), (0.0, "9")),
    group("b", (0.4, "1"), (0.4, "1"), (1.0, "2"), (None, None), length=10),
    group("c", (None, None), (None, None), (None, None), (None, None)),
]
REPORT = EvalReport(GROUPS, Scoring(ks=(1, 2, 4)))


def test_a_report_in_one_line_as_metrics_and_as_json() -> None:
    shown = repr(REPORT)
    estimate = REPORT.estimates["accuracy"]
    assert shown.startswith(f"EvalReport(tasks={len(GROUPS)}, ") and len(shown) < 300
    assert f"accuracy={estimate.mean:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]" in shown
    assert repr(EvalReport([], Scoring())) == "EvalReport(tasks=0)"
    metrics = REPORT.metrics
    assert all(NAME.fullmatch(name) for name in metrics)
    assert metrics["eval/mean_length"] == pytest.approx((8 * 2 + 4 * 10) / 12)
    assert (metrics["eval/p50_length"], metrics["eval/max_length"]) == (2.0, 10.0)
    assert metrics["eval/truncated_share"] == pytest.approx(3 / 12)
    assert metrics["eval/truncated"] == 3.0
    assert (metrics["eval/reward_error"], metrics["eval/tasks"]) == (5.0, 3.0)
    assert metrics["eval/accuracy_low"] <= metrics["eval/accuracy"] <= metrics["eval/accuracy_high"]
    content = json.loads(json.dumps(REPORT.as_json(), allow_nan=False))
    assert [task["right"] for task in content["by_task"]] == [2, 1, 0]
    assert content["by_task"][1]["rewards"] == [0.4, 0.4, 1.0, None]
    assert content["by_task"][0]["answered"] == ["7", "8", "7", "9"]
    assert content["statuses"]["reward_error"] == 5
    assert set(content["estimates"]["accuracy"]) == {"mean", "low", "high", "tasks"}


def test_estimates_are_means_over_tasks_of_what_has_a_reward() -> None:
    found = {name: (estimate.mean, estimate.tasks) for name, estimate in REPORT.estimates.items()}
    assert found["accuracy"] == (pytest.approx((1 / 2 + 1 / 3) / 2), 2)
    assert found["pass_at_1"] == found["accuracy"]
    assert found["reward_mean"] == (pytest.approx((0.5 + 0.6) / 2), 2)
    assert found["pass_at_2"] == (pytest.approx((5 / 6 + 2 / 3) / 2), 2)
    assert found["pass_at_4"] == (1.0, 1)  # of task b only three have a reward
    assert found["maj_at_4"] == (1.0, 1)
    assert "maj_at_1" not in found
    assert EvalReport(GROUPS, Scoring(right_from=0.4)).accuracy == pytest.approx((1 / 2 + 1) / 2)
    silent = EvalReport([group("a", (1.0, None), (0.0, None))], Scoring(ks=(2,)))
    assert set(silent.estimates) == {"accuracy", "reward_mean", "pass_at_2"}
    empty = EvalReport(GROUPS[2:], Scoring(ks=(1,)))
    assert empty.accuracy is None and "eval/accuracy" not in empty.metrics
    assert empty.metrics["eval/reward_error"] == 4.0
    assert empty.failures.share == 1.0


def test_what_ran_out_of_turns_is_not_truncated_and_has_its_reward() -> None:
    one = replace(rollout(Task("t", "prompt of t"), 1.0), status=RolloutStatus.UNFINISHED)
    report = EvalReport([RolloutGroup(one.task, (one,))], Scoring())
    assert report.metrics["eval/unfinished"] == report.accuracy == 1.0 and report.metrics["eval/truncated_share"] == 0.0
    cells = [str(cell) for cell in report_table({"m": report}, {}).columns[0].cells]
    assert "unfinished" in cells and cells.count("truncated") == 1


def test_models_are_compared_task_by_task() -> None:
    better = EvalReport(
        [
            group("a", (1.0, "7"), (1.0, "7"), (1.0, "7"), (0.0, "9")),
            group("b", (None, None), (None, None), (None, None), (None, None)),
            group("c", (1.0, "3"), (1.0, "3"), (1.0, "3"), (1.0, "3")),
        ],
        Scoring(ks=(1, 2, 4)),
    )
    found = differences(better, REPORT)
    assert (found["accuracy"].mean, found["accuracy"].tasks) == (pytest.approx(0.25), 1)
    assert found["pass_at_2"].mean == pytest.approx(1 - 5 / 6)
    with pytest.raises(AssertionError, match="different tasks"):
        differences(EvalReport(GROUPS[:2], Scoring()), REPORT)


def test_what_makes_tasks_hard_cancels_in_a_difference() -> None:
    """Tasks differ much, models little: each model's interval is wide, that of their difference is not."""
    hard = [group(f"h{n}", (0.0, None), (0.0, None)) for n in range(20)]
    easy = [group(f"e{n}", (1.0, None), (1.0, None)) for n in range(20)]
    harder = [group(f"h{n}", (float(n < 10), None), (0.0, None)) for n in range(20)]
    base, model = EvalReport(hard + easy, Scoring()), EvalReport(harder + easy, Scoring())
    difference = differences(model, base)["accuracy"]
    assert difference.mean == pytest.approx(5 / 40) and difference.low > 0
    of_model = model.estimates["accuracy"]
    assert difference.high - difference.low < 0.6 * (of_model.high - of_model.low)
    model = EvalReport([group(f"t{n}", (float(n < 10), None)) for n in range(16)], Scoring())
    found = differences(model, model)
    assert found["reward_mean"] == found["accuracy"] and -found["accuracy"].low == found["accuracy"].high > 0.1
