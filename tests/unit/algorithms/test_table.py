"""What `build_algorithm` makes of the recipe's words: who is learnt from, with which advantages, weights and models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octetrl.algorithms.rejection import best_of_group
from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs
from octetrl.algorithms.weighting import weigh
from octetrl.records import Rollout, RolloutGroup, RolloutStatus, Task
from tests.objectives import objective

TASK = Task(id="t", prompt="p")


def rollout(reward: float | None, status: RolloutStatus | None = None) -> Rollout:
    default = RolloutStatus.SCORED if reward is not None else RolloutStatus.REWARD_ERROR
    return Rollout(TASK, (), status or default, reward)


@pytest.mark.parametrize(
    ("choices", "rewards", "kept"),
    [
        ({}, (1.0, 0.0, None), True),
        ({}, (1.0, 1.0, 1.0), False),
        ({}, (1.0, None, None), False),
        ({}, (None, None), False),
        ({"drop_zero_variance": False}, (1.0, 1.0), True),
        ({"drop_zero_variance": False}, (1.0, None), False),  # without a baseline
        ({"name": "reinforce_pp"}, (0.5,), True),  # it needs no siblings
        ({"name": "reinforce_pp"}, (None,), False),
        ({"name": "rloo"}, (0.5,), False),
    ],
)
def test_groups_that_teach_nothing_are_dropped(
    choices: dict[str, Any], rewards: tuple[float | None, ...], kept: bool
) -> None:
    assert build_algorithm(objective(**choices)).keeps(RolloutGroup(TASK, tuple(map(rollout, rewards)))) == kept


def test_overlong_rollouts_are_trained_on_unless_masked() -> None:
    masking = build_algorithm(objective(overlong="mask"))
    for status in (RolloutStatus.TRUNCATED, RolloutStatus.UNFINISHED):
        cut = rollout(0.0, status)
        assert build_algorithm(objective()).trains(cut)
        assert not masking.trains(cut) and masking.trains(rollout(1.0))


@pytest.mark.parametrize(
    ("choices", "groups", "advantages"),
    [
        ({"normalize_advantages": False}, [[3.0, 1.0]], [[1.0, -1.0]]),
        ({"name": "sft"}, [[3.0, 1.0]], [[1.0, 1.0]]),
        (
            {"name": "rft", "best_of_group": 1, "reward_threshold": 0.5},
            [[0.0, 1.0, 1.0], [0.0, 0.4]],
            [[None, 1.0, None], [None, None]],
        ),
    ],
)
def test_advantages_follow_the_recipe(choices: dict[str, Any], groups: Any, advantages: Any) -> None:
    assert build_algorithm(objective(**choices)).advantages(groups) == advantages


@pytest.mark.parametrize(
    ("choices", "reference", "proximal", "shapes"),
    [
        ({}, False, True, False),
        ({"kl_coefficient": 0.01}, True, True, False),
        ({"name": "sft"}, False, False, False),
        ({"name": "rft"}, False, False, False),
        ({"name": "dpo"}, True, False, False),
        ({"name": "ipo"}, True, False, False),
        ({"name": "distill", "teacher": "t"}, True, True, True),
        ({"name": "distill", "teacher": "t", "distillation": "forward_kl", "teacher_top_k": 5}, True, False, False),
    ],
)
def test_models_and_passes_that_an_objective_needs(
    choices: dict[str, Any], reference: bool, proximal: bool, shapes: bool
) -> None:
    algorithm = build_algorithm(objective(**choices))
    needs = (algorithm.needs_reference, algorithm.needs_proximal, algorithm.shape is not None)
    assert needs == (reference, proximal, shapes)
    assert algorithm.needs_teacher == (algorithm.name == "distill")
    assert algorithm.teacher_top_k == choices.get("teacher_top_k", 0)
    assert algorithm.token_weighting == "sequence" or algorithm.name not in ("dpo", "ipo"), "the mean over pairs"


def test_sft_is_the_negative_logprob() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    algorithm = build_algorithm(objective(name="sft"))
    loss = algorithm.loss(LossInputs(logprobs, torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.int64), 1))
    assert loss.loss_N.tolist() == [1.0, 2.0] and not loss.metrics


@pytest.mark.parametrize(
    ("best", "threshold", "expected"),
    [
        (1, 0.0, [3]),
        (2, 0.0, [1, 3]),
        (9, 0.0, [1, 3, 4]),  # the others have no reward above 0
        (9, -1.0, [0, 1, 2, 3, 4]),
        (9, 2.0, []),
    ],
)
def test_the_best_above_the_threshold(best: int, threshold: float, expected: list[int]) -> None:
    advantages = best_of_group([0.0, 1.0, -0.5, 2.0, 1.0], best, threshold)
    assert [place for place, advantage in enumerate(advantages) if advantage == 1.0] == expected
    assert advantages.count(None) == 5 - len(expected)


def test_token_weights_and_their_denominator() -> None:
    assert weigh([3, 1, 6], "token") == ([1.0, 1.0, 1.0], 10.0)
    assert weigh([4, 1, 2], "sequence") == ([0.25, 1.0, 0.5], 3.0)
    for counts in ([], [2, 0]):
        with pytest.raises(AssertionError, match="left out"):
            weigh(counts, "token")


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.sampled_from(["token", "sequence"]))
def test_a_constant_loss_keeps_its_value(counts: list[int], weighting: str) -> None:
    token_weights, denominator = weigh(counts, weighting)
    total = sum(count * weight for count, weight in zip(counts, token_weights, strict=True))
    assert total / denominator == pytest.approx(1.0)
