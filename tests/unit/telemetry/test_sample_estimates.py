"""pass@k and maj@k against all subsets counted one by one, and intervals against what they promise."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.telemetry import sample_estimates
from octetrl.telemetry.sample_estimates import Vote, estimate_mean, majority_at_k, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    subsets = list(combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_not_the_biased_one() -> None:
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)  # 1 - (1 - 2/4)^2 would be 3/4
    assert (pass_at_k(200, 0, 100), pass_at_k(200, 101, 100), pass_at_k(7, 3, 1)) == (0.0, 1.0, pytest.approx(3 / 7))
    with pytest.raises(AssertionError):
        pass_at_k(3, 1, 4)


def counted(votes: list[Vote], k: int) -> Fraction:
    """By the definition: the leaders of each subset share it equally, vote by vote."""
    total, subsets = Fraction(0), list(combinations(votes, k))
    for subset in subsets:
        counts = Counter(vote.answer for vote in subset if vote.answer is not None)
        if counts:
            leaders = [answer for answer, count in counts.items() if count == max(counts.values())]
            for leader in leaders:
                of_leader = [vote.is_right for vote in subset if vote.answer == leader]
                total += Fraction(sum(of_leader), len(of_leader)) / len(leaders)
    return total / len(subsets)


@given(st.lists(st.sampled_from(["7", "8", "9", None]), min_size=1, max_size=8), st.data())
def test_majority_is_counted_over_all_subsets(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    votes = [Vote(answer, answer == "7") for answer in answers]
    assert majority_at_k(votes, k, random.Random(0)) == pytest.approx(float(counted(votes, k)))


def test_a_majority_may_be_right_where_single_answers_seldom_are() -> None:
    votes = [Vote("7", True)] * 4 + [Vote(str(wrong), False) for wrong in range(10, 16)]
    assert majority_at_k(votes, 1, random.Random(0)) == pytest.approx(0.4)
    assert majority_at_k(votes, 10, random.Random(0)) == 1.0
    assert majority_at_k([Vote(None, False)] * 3, 2, random.Random(0)) == 0.0
    assert majority_at_k([Vote("7", True), Vote(None, False), Vote(None, False)], 3, random.Random(0)) == 1.0


def test_many_subsets_are_drawn_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = [Vote(str(number % 4), number % 4 == 1) for number in range(14)]
    exact = majority_at_k(votes, 4, random.Random(0))
    monkeypatch.setattr(sample_estimates, "SUBSETS", 900)  # of 1,001
    drawn = [majority_at_k(votes, 4, random.Random(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn == pytest.approx([exact] * 3, abs=0.05)


def test_intervals_hold_the_true_mean_as_often_as_they_say() -> None:
    chance = numpy.random.default_rng(0)
    held = 0
    for seed in range(100):
        estimate = estimate_mean(list(chance.binomial(8, 0.3, size=60) / 8), seed)
        assert estimate is not None and estimate.low < estimate.mean < estimate.high and estimate.tasks == 60
        held += estimate.low <= 0.3 <= estimate.high
    assert 88 <= held <= 99
    assert estimate_mean([], 0) is None


def test_intervals_follow_from_the_seed_and_not_from_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = list(numpy.random.default_rng(0).random(30))
    first = estimate_mean(values, 3)
    assert first == estimate_mean(values, 3)
    assert first != estimate_mean(values, 4)
    monkeypatch.setattr(sample_estimates, "_DRAWN_AT_ONCE", 64)
    assert estimate_mean(values, 3) == first


@pytest.mark.parametrize("tasks", [1, 16, 200])
def test_equal_values_leave_room_for_what_was_not_seen(tasks: int) -> None:
    """Wilson's interval of a share: its ends are the p for which |share - p| = z * sqrt(p (1 - p) / tasks)."""
    z = 1.959963984540054
    for share in (0.0, 1.0):
        estimate = estimate_mean([share] * tasks, 0, (0.0, 1.0))
        assert estimate is not None and 0 <= estimate.low <= share == estimate.mean <= estimate.high <= 1
        for end in (estimate.low, estimate.high):
            assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / tasks), abs=1e-9)
        assert estimate.high - estimate.low > 0.01
    same = estimate_mean([0.0] * tasks, 0, (-1.0, 1.0))
    assert same is not None and -same.low == same.high == pytest.approx(1 - estimate.low), "to both sides"
    plain = estimate_mean([1.0] * tasks, 0)
    assert plain is not None and plain.low == plain.high == 1.0, "a reward may have any range"
