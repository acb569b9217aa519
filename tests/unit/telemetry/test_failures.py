"""A share of failures, and what is said of it."""

from __future__ import annotations

import pytest

from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.telemetry.rollout_metrics import Failures, FailureShareError

TURN = Turn((1,), Completion((2, 3), (-0.1, -0.2), "I say 7", FinishReason.STOP, 0, "digest"))


def rollout(status: RolloutStatus, task: str, detail: str | None = None, trace: str | None = None) -> Rollout:
    turns = () if status is RolloutStatus.PROMPT_TOO_LONG else (TURN,)
    return Rollout(Task(task, "?"), turns, status, 1.0 if status.has_reward else None, detail, trace)


def groups(*rollouts: Rollout) -> list[RolloutGroup]:
    return [RolloutGroup(one.task, (one,)) for one in rollouts]


FAILED = groups(
    rollout(RolloutStatus.REWARD_ERROR, "a", "KeyError: 'x' (r.py:3)", 'File "r.py", line 3\nKeyError: x'),
    rollout(RolloutStatus.REWARD_ERROR, "b", "KeyError: 'y' (r.py:3)", "another KeyError"),
    rollout(RolloutStatus.REWARD_ERROR, "c", "ValueError: no (r.py:9)", "ValueError: no"),
    rollout(RolloutStatus.REWARD_TIMEOUT, "d", "no reward after 2 s; raise environment.reward_timeout_seconds"),
    rollout(RolloutStatus.SCORED, "e"),
    rollout(RolloutStatus.TRUNCATED, "f"),
    rollout(RolloutStatus.PROMPT_TOO_LONG, "g", "the prompt has 9 tokens"),
)


def test_a_prompt_that_is_too_long_is_no_failure() -> None:
    failures = Failures.among(FAILED)
    assert (failures.count, failures.drawn, failures.share) == (4, 6, pytest.approx(4 / 6))
    assert [(kind.count, kind.first.task.id) for kind in failures.kinds] == [(2, "a"), (1, "c"), (1, "d")]
    assert Failures.among([]).share == 0.0


def test_the_first_traceback_of_each_kind_is_shown() -> None:
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


def test_every_status_is_a_failure_has_a_reward_or_was_never_drawn() -> None:
    for status in RolloutStatus:
        failures = Failures.among(groups(rollout(status, "a")))
        assert failures.count == (not status.has_reward and status is not RolloutStatus.PROMPT_TOO_LONG), status
