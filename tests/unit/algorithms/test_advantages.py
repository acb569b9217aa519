"""Group-relative advantages against numbers worked out by hand, and their invariants."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.algorithms.advantages import group_relative_advantages


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
