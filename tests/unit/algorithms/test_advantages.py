"""Group-relative advantages against numbers worked out by hand, and their invariants."""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octetrl.algorithms.advantages import group_relative_advantages
from octetrl.algorithms.filters import has_variance
from octetrl.algorithms.reinforce_pp import whitened
from octetrl.algorithms.rloo import leave_one_out_advantages
from octetrl.algorithms.spread import differences_from_mean
from octetrl.records import Rollout, RolloutGroup, RolloutStatus, Task


def test_two_right_of_four() -> None:
    # mean 0.5, sample deviation sqrt(4 * 0.25 / 3) = 1 / sqrt(3)
    expected = 0.5 * math.sqrt(3)
    assert group_relative_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([expected, -expected, -expected, expected])


def test_without_the_deviation() -> None:
    assert group_relative_advantages([2.0, 0.0, 1.0], normalize=False) == pytest.approx([1.0, -1.0, 0.0])


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 7, [1 / 3] * 3])
def test_nothing_to_compare_gives_exact_zeros(rewards: list[float]) -> None:
    assert group_relative_advantages(rewards) == [0.0] * len(rewards)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=16).filter(lambda rewards: len(set(rewards)) > 1))
def test_mean_zero_deviation_one_and_order_kept(rewards: list[int]) -> None:
    advantages = group_relative_advantages([float(reward) for reward in rewards])
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9)
    assert statistics.stdev(advantages) == pytest.approx(1.0)
    assert sorted(range(len(rewards)), key=lambda i: (rewards[i], i)) == sorted(
        range(len(rewards)), key=lambda i: (advantages[i], i)
    )


# --- a spread that is rounding ------------------------------------------------------------------------------------

SCALES = [sign * 10.0**power for power in (-300, -30, -6, 0, 6, 30, 300) for sign in (1, -1)]
RULES = (group_relative_advantages, leave_one_out_advantages, differences_from_mean)


def is_kept(rewards: list[float]) -> bool:
    task = Task(id="t", prompt="p")
    return has_variance(RolloutGroup(task, tuple(Rollout(task, (), RolloutStatus.SCORED, one) for one in rewards)))


def added(parts: list[float]) -> float:
    """One after the other; `sum` compensates for the rounding since Python 3.12."""
    return functools.reduce(operator.add, parts)


def stepped(value: float, ulps: int) -> float:
    for _ in range(ulps):
        value = math.nextafter(value, math.inf)
    return value


@pytest.mark.parametrize("scale", SCALES)
def test_equal_sums_that_rounding_tells_apart_are_equal(scale: float) -> None:
    parts = [scale * part for part in (0.1, 0.2, 0.3, 0.7, 1.1, 0.05, 0.6, 0.9, 0.15)]
    sums = [added(parts[turn:] + parts[:turn]) for turn in range(len(parts))]
    means = [added([scale * 0.7] * n) / n for n in range(1, 17)]
    groups = [[scale * 0.1 + scale * 0.2, *[scale * 0.3] * 3], sums, means, [scale, stepped(scale, 8)], [scale] * 3]
    assert abs(scale) != 1.0 or (len(set(sums)) > 1 and len(set(means)) > 1)
    for rewards in groups:
        assert not is_kept(rewards)
        for rule in RULES:
            assert rule(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("spread", [1e-13, 1e-6, 1.0])
def test_small_spreads_are_kept_exactly(scale: float, spread: float) -> None:
    """Against exact rational arithmetic. The rounding of the mean costs an eps of the size, over the spread."""
    rewards = [scale, scale + scale * spread, scale + scale * spread / 2, scale]
    assert is_kept(rewards)
    exact = [Fraction(reward) for reward in rewards]
    differences = [one - sum(exact) / 4 for one in exact]
    square = sum(d * d for d in differences) / 3
    unit = Fraction(scale) ** 2  # so that no float underflows
    deviation = math.sqrt(square / unit) * abs(scale)
    tolerance = 4 * 2.2e-16 / spread
    for found, one in zip(group_relative_advantages(rewards), differences, strict=True):
        assert found == pytest.approx(float(one / Fraction(deviation)), rel=tolerance, abs=tolerance)
    for found, one in zip(leave_one_out_advantages(rewards), differences, strict=True):
        assert found == pytest.approx(float(one * 4 / 3), rel=tolerance, abs=tolerance * abs(scale) * spread)


def test_a_small_spread_on_a_large_offset_and_the_ends_of_the_range() -> None:
    assert group_relative_advantages([1e6, 1e6 + 1e-3]) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-6)
    assert group_relative_advantages([5e-324, 0.0]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert group_relative_advantages([1.7e308, -1.7e308]) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert differences_from_mean([1.7e308, 1.6e308]) == pytest.approx([0.05e308, -0.05e308])


def test_differences_beyond_floats_range_are_no_advantages() -> None:
    """No environment gives such rewards (LARGEST_REWARD); an infinite advantage would be found only at the loss."""
    with pytest.raises(AssertionError, match="differ by no finite number"):
        differences_from_mean([1.7e308, 1.7e308, -1.7e308])
    with pytest.raises(AssertionError, match="too large to compare"):
        leave_one_out_advantages([1e308, -1e308, 1e308, 1e308])


@given(st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=9))
def test_what_the_filter_drops_has_no_advantage_and_the_rest_has(rewards: list[float]) -> None:
    for rule in RULES:
        assert any(rule(rewards)) == is_kept(rewards)


def test_values_of_a_batch_that_differ_by_rounding_are_equal() -> None:
    for scale in (1e-30, 1.0, 1e30):
        value = torch.tensor(0.3 * scale)
        other = value.nextafter(torch.tensor(math.inf))
        assert other != value and not whitened(torch.stack([value, other, value])).any()
        assert whitened(torch.tensor([1.0, 1.0 + 1e-6]) * scale).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize("rule", RULES)
def test_a_reward_that_is_the_mean_but_for_rounding_has_no_advantage(
    rule: Callable[[list[float]], list[float]],
) -> None:
    """0.8333333333333334 is the mean of these. Its token would count as clipped, though it has no gradient."""
    assert rule([1 / 6, 7 / 6, 7 / 6, 5 / 6])[3] == 0.0
