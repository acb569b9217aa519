"""What `build_algorithm` makes of the recipe's words."""

from __future__ import annotations

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs
from octetrl.records import Rollout, RolloutGroup, RolloutStatus, Task
from tests.objectives import objective

TASK = Task(id="t", prompt="p")


def group(*rewards: float | None) -> RolloutGroup:
    return RolloutGroup(TASK, tuple(rollout(reward) for reward in rewards))


def rollout(reward: float | None, status: RolloutStatus | None = None) -> Rollout:
    default = RolloutStatus.SCORED if reward is not None else RolloutStatus.REWARD_ERROR
    return Rollout(TASK, (), status or default, reward)


def test_groups_that_teach_nothing_are_dropped() -> None:
    algorithm = build_algorithm(objective())
    assert algorithm.keeps(group(1.0, 0.0, None))
    assert not algorithm.keeps(group(1.0, 1.0, 1.0))
    assert not algorithm.keeps(group(1.0, None, None))
    assert not algorithm.keeps(group(None, None))


def test_zero_variance_groups_can_be_kept_but_not_those_without_baseline() -> None:
    algorithm = build_algorithm(objective(drop_zero_variance=False))
    assert algorithm.keeps(group(1.0, 1.0)) and not algorithm.keeps(group(1.0, None))


def test_overlong_rollouts_are_trained_on_unless_masked() -> None:
    masking = build_algorithm(objective(overlong="mask"))
    for status in (RolloutStatus.TRUNCATED, RolloutStatus.UNFINISHED):
        cut = rollout(0.0, status)
        assert build_algorithm(objective()).trains(cut)
        assert not masking.trains(cut) and masking.trains(rollout(1.0))


def test_advantages_follow_the_recipe() -> None:
    assert build_algorithm(objective(normalize_advantages=False)).advantages([[3.0, 1.0]]) == [[1.0, -1.0]]
    assert build_algorithm(objective(name="sft")).advantages([[3.0, 1.0]]) == [[1.0, 1.0]]


def test_a_reference_is_needed_only_for_a_kl_term() -> None:
    assert not build_algorithm(objective()).needs_reference
    assert build_algorithm(objective(kl_coefficient=0.01)).needs_reference


def test_sft_is_the_negative_logprob() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    algorithm = build_algorithm(objective(name="sft"))
    loss = algorithm.loss(LossInputs(logprobs, torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), 1))
    assert loss.loss_N.tolist() == [1.0, 2.0] and not loss.metrics and not algorithm.needs_proximal
