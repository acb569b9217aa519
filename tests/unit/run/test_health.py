"""A run that can't learn ends, and says why: which step, what was missing, what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.config.several_environments import never_drawn
from octetrl.environments.mixed import MixedScorer
from octetrl.environments.named_rewards import NamedReward, RewardsInRun
from octetrl.environments.reward_workers import GROW_SECONDS, FunctionRewards, Growth
from octetrl.environments.scoring import LEAST_TRIED, RewardTimes, TimeoutBudget
from octetrl.environments.tasks import furthest_behind, shares_of
from octetrl.run.health import EmptySteps, SlowRewards
from octetrl.system.errors import RunFailed

TRAINED = {"loss": 0.1, "reward/count": 8.0, "rollout/count": 8.0, "rollout/prompt_too_long": 0.0}
EMPTY = {"train/skipped": 1.0, "rollout/count": 8.0, "reward/count": 0.0, "rollout/prompt_too_long": 0.0}
TOO_LONG = EMPTY | {"rollout/prompt_too_long": 8.0}
FAILING = EMPTY | {"rollout/reward_timeout": 6.0, "rollout/reward_error": 2.0}
EQUAL = EMPTY | {"reward/count": 8.0, "reward/mean": 0.25, "reward/zero_variance_fraction": 1.0}
ZERO = EQUAL | {"reward/mean": 0.0, "reward/std": 0.0}
BELOW = ZERO | {"reward/mean": -1.0, "reward/count": 6.0}
MIXED = ZERO | {"reward/std": 1.0}  # -1 in some groups, 1 in others
SOLVED = EQUAL | {"reward/mean": 1.0}
CUT = EQUAL | {"reward/zero_variance_fraction": 0.5, "rollout/truncated_share": 1.0}


def empty_steps(most: int = 3, past: Sequence[Mapping[str, float | None]] = ()) -> EmptySteps:
    tree = {"model": {"path": "m"}, "environment": {"dataset": "chain_sum"}, "failures": {"max_empty_steps": most}}
    return EmptySteps(recipe_from_mapping(tree), past)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (TOO_LONG, "every prompt has more than 1024 tokens; raise rollout.max_prompt_tokens"),
        (FAILING, r"none of 8 rollouts has a reward \(2 reward_error, 6 reward_timeout\)"),
        ({"train/skipped": 1.0}, "no example of the batch has a token to train on"),
    ],
)
def test_a_first_step_without_any_reward_ends_the_run(metrics: dict[str, float], reason: str) -> None:
    steps = empty_steps()
    assert steps.warning(1, metrics) is not None
    with pytest.raises(RunFailed, match=f"step 1 has no trained token: {reason}"):
        steps.check(1, metrics)


def test_a_later_step_without_any_reward_is_one_of_three_and_zero_never_ends_it() -> None:
    steps = empty_steps()
    for step, now in enumerate((TRAINED, FAILING, FAILING), start=1):
        steps.warning(step, now)
        steps.check(step, now)
    steps.warning(4, FAILING)
    with pytest.raises(RunFailed, match="3 steps in a row have no trained token"):
        steps.check(4, FAILING)
    steps = empty_steps(0)
    for step in range(1, 20):
        assert steps.warning(step, FAILING) is not None
        steps.check(step, FAILING)
    steps = empty_steps(past=[TRAINED, ZERO, ZERO, ZERO])
    assert len(said(steps, (ZERO, ZERO, ZERO), 5)) == 4


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (EQUAL | {"rollout/mean_length": 1.0}, "equal within every group, and the answers are empty (all 8 answers"),
        (
            EQUAL,
            "the rewards are equal within every group (all 8 answers were scored; mean reward 0.25); give easier or",
        ),
        (ZERO, "no answer has a reward above 0 (all 8 answers were scored; mean reward 0); give easier tasks"),
        (BELOW, "no answer has a reward above 0 (6 of 8 answers were scored; mean reward -1); give easier tasks"),
        (MIXED, "the rewards are equal within every group (all 8 answers were scored; mean reward 0); give easier or"),
        (CUT, "every answer is truncated (all 8 answers were scored); raise rollout.max_new_tokens"),
    ],
)
def test_rewards_without_a_signal_end_it_after_three_steps_in_a_row(metrics: dict[str, float], reason: str) -> None:
    steps = empty_steps()
    for step, now in enumerate((metrics, metrics, TRAINED, metrics, metrics), start=1):
        warning = steps.warning(step, now)
        assert (warning is None) == (now is TRAINED)
        assert warning is None or (reason in warning and f"rollouts/step_{step:06d}.jsonl" in warning)
        steps.check(step, now)
    steps.warning(6, metrics)
    with pytest.raises(RunFailed) as error:
        steps.check(6, metrics)
    assert str(error.value).startswith("3 steps in a row have no trained token (failures.max_empty_steps); in the last")
    assert reason in str(error.value)


def test_solved_tasks_are_no_failure_of_a_model_that_was_trained() -> None:
    solved, steps = SOLVED, empty_steps()
    for step, now in enumerate((TRAINED, solved, solved, solved, solved), start=1):
        warning = steps.warning(step, now)
        assert (warning is not None) == (step == 2), "said once: a model that has learnt its tasks goes on so"
        assert (
            warning is None
            or "no update, because all answers are right (all 8 answers were scored; mean reward 1)" in warning
        )
        steps.check(step, now)
    untrained = empty_steps()
    for step in (1, 2, 3):
        assert "all answers are right" in str(untrained.warning(step, solved))
    with pytest.raises(RunFailed, match=r"all answers are right .*; give harder tasks"):
        untrained.check(3, solved)


def said(steps: EmptySteps, rows: Sequence[Mapping[str, float]], first: int) -> list[str | None]:
    """The warnings of these steps, and at the end the reason that ends the run."""
    heard: list[str | None] = []
    for step, row in enumerate(rows, start=first):
        heard.append(steps.warning(step, row))
        try:
            steps.check(step, row)
        except RunFailed as error:
            return [*heard, str(error)]
    return heard


@pytest.mark.parametrize(
    "rows",
    [
        (TRAINED, SOLVED, SOLVED, SOLVED, SOLVED, SOLVED),
        (TRAINED, EQUAL, EQUAL, TRAINED, ZERO, ZERO, ZERO),
        (SOLVED, TRAINED, EQUAL, SOLVED, SOLVED, CUT, EQUAL),
    ],
)
def test_a_resumed_run_says_and_ends_as_one_that_was_not_stopped(rows: Sequence[Mapping[str, float]]) -> None:
    unbroken = said(empty_steps(), rows, 1)
    for stop in range(1, len(rows)):
        past: list[Mapping[str, float | None]] = [
            {"step": step, "loss": None} | row for step, row in enumerate(rows[:stop])
        ]
        assert said(empty_steps(past=past), rows[stop:], stop + 1) == unbroken[stop:], stop


def test_an_environment_that_always_fails_is_told_once() -> None:
    tree = {"model": {"path": "m"}, "environments": {name: {"dataset": "chain_sum"} for name in "abc"}}
    steps = EmptySteps(recipe_from_mapping(tree))
    metrics = TRAINED | {
        f"environments/{name}/failure_share": share for name, share in zip("abc", (1.0, 0.5, 0.0), strict=True)
    }
    warning = steps.warning(1, metrics)
    assert warning is not None and warning.startswith("step 1: every rollout of environments.a failed, so nothing")
    assert steps.warning(2, metrics) is None
    later = steps.warning(3, metrics | {"environments/b/failure_share": 1.0})
    assert later is not None and "every rollout of environments.b failed" in later


@pytest.mark.parametrize(
    ("weights", "steps", "refills", "never"),
    [
        ({"a": 5e-324, "b": 1.0}, 20, 0, ["a"]),
        ({"a": 0.01, "b": 1.0, "c": 1.0}, 20, 0, []),
        ({"a": 0.01, "b": 0.02, "c": 1.0}, 4, 0, ["a", "b"]),
        ({"a": 0.01, "b": 0.02, "c": 1.0}, 4, 3, []),
        ({"a": 1.0, "b": 99.0}, 1, 0, ["a"]),
        ({"a": 1.0, "b": 7.0}, 1, 0, []),
    ],
)
def test_a_weight_that_gives_no_task_is_told(
    weights: dict[str, float], steps: int, refills: int, never: list[str]
) -> None:
    tree = {"model": {"path": "m"}, "steps": steps, "rollout": {"prompts_per_step": 4}}
    tree |= {"algorithm": {"name": "dapo", "max_refills": refills}}
    several = {name: {"dataset": "chain_sum", "weight": weight} for name, weight in weights.items()}
    lines = never_drawn(recipe_from_mapping(tree | {"environments": several}))
    assert [text.partition(".weight: ")[0] for text in lines] == [f"environments.{name}" for name in never]
    assert all(f"no task in {steps} steps of 4 tasks" in text for text in lines)
    shares, taken = shares_of(list(weights.values())), [0] * len(weights)
    for _ in range(4 * steps * (1 + refills)):
        taken[furthest_behind(shares, taken)] += 1
    assert [name for name, number in zip(weights, taken, strict=True) if number == 0] == never


def test_slow_rewards_of_several_environments_name_the_section_and_crashes() -> None:
    seconds, slow_call = {"time/reward": 3.0, "time/step": 4.0}, RewardTimes(3.0, 2.5, "b/x/7")

    def warning_of(step: int, metrics: dict[str, float], times: RewardTimes) -> str | None:
        return SlowRewards(MixedScorer({})).warning(step, metrics, times)

    warning = warning_of(2, seconds, slow_call)
    assert warning is not None and "was task 'b/x/7'" in warning
    assert warning.endswith("or raise environments.b.reward_workers")
    assert (warning_of(3, seconds, RewardTimes(3.0)) or "").endswith("or raise environments.NAME.reward_workers")
    crashes = seconds | {"rollout/reward_crash": 6.0, "rollout/reward_restarts": 6.0}
    crashed = warning_of(3, crashes, RewardTimes(3.0))
    assert crashed is not None and "6 reward processes were replaced (6 reward_crash" in crashed
    assert "faster" not in crashed and crashed.endswith("rollouts/step_000003.jsonl says why")
    slow_too = warning_of(4, crashes, slow_call)
    assert slow_too is not None and "was task 'b/x/7'" in slow_too, "the slow call has most of the time"


def test_a_slow_reward_in_the_runs_process_is_given_its_own_advice() -> None:
    class Scorer:
        def score(self, completions: Any) -> Any: ...
        def close(self) -> None: ...

    limited = NamedReward("a", lambda task, text: 1.0, 1.0, 3, None)
    for scorer, advice in (
        (
            RewardsInRun(Scorer(), [], limited=[limited], timeout_seconds=1.0),
            "max_concurrent or per_minute in environment.reward",
        ),
        (RewardsInRun(Scorer(), [limited], timeout_seconds=1.0), "make the score faster"),
    ):
        warning = SlowRewards(scorer).warning(1, {"time/reward": 5.0, "time/step": 6.0}, RewardTimes(5.0))
        assert warning is not None and warning.endswith(advice)


def test_only_time_outs_from_the_first_call_on_end_the_patience() -> None:
    patience = TimeoutBudget(2)
    for _ in range(LEAST_TRIED - 1):
        patience.ended(timed_out=True)
        assert not patience.is_over
    patience.ended(timed_out=True)
    assert patience.is_over and f"the first {LEAST_TRIED} calls" in str(patience.score.detail)
    patience.ended(timed_out=False)  # a call that was running
    assert not patience.is_over
    longer = TimeoutBudget(LEAST_TRIED + 1)
    for tried in range(LEAST_TRIED + 1):
        assert not longer.is_over, tried
        longer.ended(timed_out=True)
    assert longer.is_over
    one_came = TimeoutBudget(2)
    one_came.ended(timed_out=False)
    for _ in range(100):
        one_came.ended(timed_out=True)
    assert not one_came.is_over


def test_processes_double_while_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("octetrl.environments.reward_workers.time.monotonic", lambda: now[0])
    monkeypatch.setattr("octetrl.environments.reward_workers.num_cores", lambda: 6)
    growth, processes, counts = Growth(None), 1, []
    for _ in range(12):
        processes += growth.more(100, processes)
        counts.append(processes)
        now[0] += GROW_SECONDS / 2
    assert counts == sorted(counts) and set(counts) == {1, 2, 4, 6}
    assert growth.more(100, 6) == 0 and growth.grows_at() == math.inf
    fixed = Growth(3)
    assert fixed.first == 3 and fixed.more(100, 3) == 0


def test_a_step_that_waits_for_rewards_names_the_slowest_task() -> None:
    slow, scorer = SlowRewards(FunctionRewards(lambda task, text: 1.0, timeout_seconds=1.0)), MixedScorer({})
    rounds = RewardTimes(2.0, 0.5, "quick"), RewardTimes(3.0, 4.0, "slow"), RewardTimes(1.0)
    times = rounds[0].followed_by(rounds[1]).followed_by(rounds[2])
    metrics = times.metrics | {"time/step": 8.0}
    assert metrics == {"time/reward": 6.0, "time/reward_slowest": 4.0, "time/step": 8.0}
    warning = slow.warning(2, metrics, times)
    assert warning is not None
    assert "step 2: 6.0 of 8.0 s were spent waiting for rewards (the slowest call, 4.0 s, was task 'slow')" in warning
    assert slow.warning(3, metrics, times) is None, "once a run"
    assert RewardTimes().metrics == {"time/reward": 0.0}
    assert SlowRewards(scorer).warning(1, {"time/reward": 3.0, "time/step": 8.0}, None) is None
    assert SlowRewards(scorer).warning(1, {"time/reward": 0.9, "time/step": 1.0}, None) is None, "too little to matter"
