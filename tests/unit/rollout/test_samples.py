"""Groups to samples: who is in the baseline, who is trained on, and which tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octetrl.algorithms.table import build_algorithm
from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.rollout.samples import to_samples, versions_of
from tests.objectives import objective

TASK = Task(id="a", prompt="?")


def completion(*token_ids: int, version: int = 3) -> Completion:
    logprobs = tuple(-0.5 - token for token in token_ids)
    return Completion(token_ids, logprobs, "text", FinishReason.STOP, version, "digest")


def rollout(reward: float | None, status: RolloutStatus = RolloutStatus.SCORED) -> Rollout:
    return Rollout(TASK, (Turn((1, 2), completion(5, 6, 7)),), status, reward)


def group_of(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(TASK, rollouts)


def test_a_rollout_without_reward_is_in_neither_baseline_nor_training() -> None:
    algorithm = build_algorithm(objective(normalize_advantages=False))
    failed = rollout(None, RolloutStatus.REWARD_ERROR)
    with_failed = to_samples([group_of(rollout(1.0), failed, rollout(0.0))], algorithm)
    without = to_samples([group_of(rollout(1.0), rollout(0.0))], algorithm)
    assert with_failed == without
    assert [sample.advantage for sample in without] == [0.5, -0.5]
    twice = to_samples([group_of(rollout(1.0), failed), group_of(rollout(1.0), rollout(0.0))], algorithm)
    assert [sample.group for sample in twice] == [0, 1, 1]
    as_zero = to_samples([group_of(rollout(1.0), rollout(0.0), rollout(0.0))], algorithm)
    assert as_zero[0].advantage != without[0].advantage


def test_a_masked_overlong_rollout_counts_in_the_baseline_alone() -> None:
    algorithm = build_algorithm(objective(normalize_advantages=False, overlong="mask"))
    group = group_of(rollout(1.0), rollout(0.0, RolloutStatus.TRUNCATED), rollout(0.0))
    assert [sample.advantage for sample in to_samples([group], algorithm)] == pytest.approx([2 / 3, -1 / 3])


def test_only_generated_tokens_are_trained_on_across_turns() -> None:
    turns = (Turn((1, 2), completion(5, 6), replies=(Reply("user", "and?"),)), Turn((8, 9), completion(7)))
    group = group_of(Rollout(TASK, turns, RolloutStatus.SCORED, 1.0), rollout(0.0))
    sample = to_samples([group], build_algorithm(objective()))[0]
    assert sample.token_ids == (1, 2, 5, 6, 8, 9, 7)
    assert sample.loss_mask == (False, False, True, True, False, False, True)
    assert sample.generator_logprobs == (0.0, 0.0, -5.5, -6.5, 0.0, 0.0, -7.5)
    assert (sample.policy_version, sample.precision_digest) == (3, "digest")


def test_each_token_has_the_policy_that_sampled_it() -> None:
    first = replace(completion(5, 6, 7), updates=((1, 4), (2, 6)))
    turns = (Turn((1,), first), Turn((2, 9), completion(8, version=6)))
    group = group_of(Rollout(TASK, turns, RolloutStatus.SCORED, 1.0), rollout(0.0))
    samples = to_samples([group], build_algorithm(objective()))
    assert samples[0].token_versions == (3, 3, 4, 6, 6, 6, 6)
    assert [(sample.policy_version, sample.token_versions is None) for sample in samples] == [(3, False), (3, True)]
    assert versions_of(samples[1]) == (3,) * 5


def test_turns_under_two_precision_tables_are_a_bug() -> None:
    turns = (Turn((1,), completion(5)), Turn((2,), replace(completion(6), precision_digest="other")))
    group = group_of(Rollout(TASK, turns, RolloutStatus.SCORED, 1.0), rollout(0.0))
    with pytest.raises(AssertionError, match="several precision tables"):
        to_samples([group], build_algorithm(objective()))
