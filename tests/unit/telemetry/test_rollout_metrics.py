"""Metrics of a step's rollouts, and the share of those that failed."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.telemetry.rollout_metrics import Failures, FailureShareError, environment_metrics, rollout_metrics
from tests.unit.telemetry.sampled_rows import FLAT, GROUP, TASK, rollout, turn


def test_metrics_leave_rollouts_without_reward_out_and_count_them() -> None:
    metrics = rollout_metrics([GROUP, FLAT])
    assert metrics["reward/mean"] == 0.75 and metrics["reward/count"] == 4
    assert metrics["reward/zero_variance_fraction"] == 0.5
    assert metrics["rollout/mean_length"] == pytest.approx((2 + 4 + 6 + 2 + 2) / 5)
    assert metrics["rollout/max_length"] == 6
    assert metrics["rollout/reward_error"] == 1 and metrics["rollout/truncated"] == 1
    assert metrics["rollout/truncated_share"] == 1 / 6 and metrics["rollout/unfinished_share"] == 0
    assert metrics["rollout/prompt_too_long"] == 1 and metrics["rollout/reward_timeout"] == 0
    assert "reward/mean" not in rollout_metrics([])


def test_the_error_of_a_mean_is_that_of_independent_prompts() -> None:
    """Siblings that are all alike are no more evidence than one; those of a prompt that has more weigh more."""

    def of(*groups: list[float]) -> float | None:
        found = [RolloutGroup(TASK, tuple(rollout(RolloutStatus.SCORED, one, turn((7,))) for one in rewards))
                 for rewards in groups]  # fmt: skip
        return rollout_metrics(found).get("reward/mean_error")

    means = [0.0, 1.0, 1.0, 0.25]
    expected = statistics.stdev(means) / 2
    assert of(*([mean] * 8 for mean in means)) == pytest.approx(expected) == of(*([mean] for mean in means))
    assert of([0.0, 0.5], [1.0], []) == pytest.approx((2 * (0.5**2 + 0.5**2)) ** 0.5 / 3)
    assert of([0.0, 1.0]) is None, "one prompt has no spread"


def test_equal_rewards_are_counted_over_groups_that_have_two() -> None:
    def group(*rewards: float) -> RolloutGroup:
        return RolloutGroup(TASK, tuple(rollout(RolloutStatus.SCORED, reward, turn((7,))) for reward in rewards))

    name = "reward/zero_variance_fraction"
    assert name not in rollout_metrics([group(0.0), group(1.0)]), "groups of one answer have no siblings"
    assert rollout_metrics([group(0.1 + 0.2, 0.3), group(1.0), group(0.0, 1.0)])[name] == 0.5, "by more than rounding"


def test_an_environment_fails_by_the_rule_of_the_run() -> None:
    def group(status: RolloutStatus) -> RolloutGroup:
        return RolloutGroup(replace(TASK, environment="y"), (rollout(status, None),))

    groups = [*(group(RolloutStatus.REWARD_ERROR) for _ in range(3)), group(RolloutStatus.PROMPT_TOO_LONG)]
    assert rollout_metrics(groups)["rollout/failure_share"] == 1.0
    assert environment_metrics(groups, ["y"], 1.0)["environments/y/failure_share"] == 1.0


# ---------------------------------------------------------------- failures

TURN = Turn((1,), Completion((2, 3), (-0.1, -0.2), "I say 7", FinishReason.STOP, 0, "digest"))


def failing(status: RolloutStatus, task: str, detail: str | None = None, trace: str | None = None) -> Rollout:
    turns = () if status is RolloutStatus.PROMPT_TOO_LONG else (TURN,)
    return Rollout(Task(task, "?"), turns, status, 1.0 if status.has_reward else None, detail, trace)


def alone(*rollouts: Rollout) -> list[RolloutGroup]:
    return [RolloutGroup(one.task, (one,)) for one in rollouts]


FAILED = alone(
    failing(RolloutStatus.REWARD_ERROR, "a", "KeyError: 'x' (r.py:3)", 'File "r.py", line 3\nKeyError: x'),
    failing(RolloutStatus.REWARD_ERROR, "b", "KeyError: 'y' (r.py:3)", "another KeyError"),
    failing(RolloutStatus.REWARD_ERROR, "c", "ValueError: no (r.py:9)", "ValueError: no"),
    failing(RolloutStatus.REWARD_TIMEOUT, "d", "no reward after 2 s; raise environment.reward_timeout_seconds"),
    failing(RolloutStatus.SCORED, "e"),
    failing(RolloutStatus.TRUNCATED, "f"),
    failing(RolloutStatus.PROMPT_TOO_LONG, "g", "the prompt has 9 tokens"),
)


def test_failures_are_counted_by_kind_with_the_first_traceback_of_each() -> None:
    failures = Failures.among(FAILED)
    assert (failures.count, failures.drawn, failures.share) == (4, 6, pytest.approx(4 / 6))
    assert [(kind.count, kind.first.task.id) for kind in failures.kinds] == [(2, "a"), (1, "c"), (1, "d")]
    assert Failures.among([]).share == 0.0
    failures = Failures.among(FAILED)
    failures.check(4 / 6, "step 3")
    with pytest.raises(FailureShareError) as stop:
        failures.check(0.5, "step 3")
    text = str(stop.value)
    assert text.startswith("step 3: 4 of 6 rollouts failed in the environment (67%; environment.max_failure_share")
    assert (
        "2 x reward_error, first in task a: KeyError: 'x' (r.py:3)\n    File \"r.py\", line 3\n    KeyError: x" in text
    )
    assert "another KeyError" not in text
    assert "1 x reward_timeout, first in task d: no reward after 2 s" in text
    assert "the completion was 'I say 7'" in text
    for status in RolloutStatus:
        failures = Failures.among(alone(failing(status, "a")))
        assert failures.count == (not status.has_reward and status is not RolloutStatus.PROMPT_TOO_LONG), status
