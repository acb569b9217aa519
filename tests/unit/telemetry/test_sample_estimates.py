"""pass@k and maj@k against all subsets counted one by one, and intervals against what they promise."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.telemetry import sample_estimates
from octetrl.telemetry.sample_estimates import Vote, estimate_mean, majority_at_k, pass_at_k, reward_range


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


Draw = Callable[[numpy.random.Generator, int], numpy.ndarray]
KINDS: dict[str, tuple[float, tuple[float, float], Draw]] = {  # true mean, range, values of so many tasks
    "right or wrong": (0.8, (0.0, 1.0), lambda chance, n: 1.0 * (chance.random(n) < 0.8)),
    "seldom right": (0.1, (0.0, 1.0), lambda chance, n: 1.0 * (chance.random(n) < 0.1)),
    "four samples": (2 / 2.3, (0.0, 1.0), lambda chance, n: chance.binomial(4, chance.beta(2, 0.3, n)) / 4),
    "hardly spread": (0.3, (0.0, 1.0), lambda chance, n: chance.binomial(8, 0.3, n) / 8),
    "few differ": (0.06, (-1.0, 1.0), lambda chance, n: chance.choice([-1.0, 0.0, 1.0], n, p=[0.02, 0.9, 0.08])),
    "few differ by less": (0.02, (-1.0, 1.0), lambda chance, n: (chance.random(n) < 0.1)
                           * (chance.binomial(4, 0.6, n) / 2 - 1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tasks", [12, 30, 50])
def test_intervals_hold_the_true_mean_as_often_as_they_say(
    kind: str, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 400 simulations, whose error is 0.011. A percentile bootstrap holds it in 0.4 to 0.9 of them."""
    monkeypatch.setattr(sample_estimates, "RESAMPLES", 1_000)
    mean, within, draw = KINDS[kind]
    chance, held = numpy.random.default_rng(tasks), 0
    for seed in range(400):
        estimate = estimate_mean(draw(chance, tasks).tolist(), seed, within)
        assert estimate is not None and estimate.tasks == tasks
        assert within[0] <= estimate.low <= estimate.mean <= estimate.high <= within[1]
        held += estimate.low <= mean <= estimate.high
    assert held / 400 > 0.925


def test_values_that_differ_by_rounding_are_equal() -> None:
    """Differences of accuracies over 100 tasks, and of three samples a task; the mean of six times 0.1 is below 0.1."""
    for values in ([0.58 - 0.57, 0.6 - 0.59, 0.02 - 0.01] * 2, [2 / 3 - 1 / 3, 1 - 2 / 3] * 3, [0.1] * 6):
        found = estimate_mean(values, seed=0)
        assert found is not None and found.low == found.high == found.mean == pytest.approx(values[0])
    assert estimate_mean([], 0) is None


def test_more_right_answers_never_lower_an_end() -> None:
    """From 0 of 16 right to 16."""
    found = [estimate_mean([1.0] * right + [0.0] * (16 - right), 0, (0.0, 1.0)) for right in range(17)]
    for ends in ([one.low for one in found if one], [one.high for one in found if one]):
        assert ends == sorted(set(ends)) and len(ends) == 17
    for one in found:  # Wilson: the ends are the p for which |share - p| = z * sqrt(p (1 - p) / tasks)
        assert one is not None
        for end in (one.low, one.high):
            assert abs(one.mean - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / 16), abs=1e-9)


@pytest.mark.parametrize(("up", "down", "tasks"), [(0, 0, 30), (3, 0, 30), (5, 2, 12), (9, 0, 9)])
def test_differences_of_single_answers_have_one_more_of_each_sign(up: int, down: int, tasks: int) -> None:
    values = [1.0] * up + [-1.0] * down + [0.0] * (tasks - up - down)
    estimate = estimate_mean(values, 0, (-1.0, 1.0))
    more = numpy.asarray([*values, 1.0, -1.0])
    half = 1.959963984540054 * more.std() / len(more) ** 0.5
    assert estimate is not None and estimate.mean == pytest.approx((up - down) / tasks)
    if up < tasks:
        assert (estimate.low, estimate.high) == pytest.approx((more.mean() - half, more.mean() + half))
    else:
        assert estimate.high == 1.0 == estimate.mean > estimate.low > 0.4
    scaled = estimate_mean([10 * one for one in values], 0, (-10.0, 10.0))
    assert scaled is not None and scaled.low == pytest.approx(10 * estimate.low)


def test_rewards_of_0_and_1_have_the_interval_of_right_answers() -> None:
    right = [1.0, 1.0, 0.0, 1.0]
    assert reward_range(right) == (0.0, 1.0) and reward_range([-2.0], [0.5, 3.0]) == (-2.0, 3.0)
    assert estimate_mean(right, 0, reward_range(right)) == estimate_mean(right, 0, (0.0, 1.0))


def test_intervals_follow_from_the_seed_and_not_from_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, hardly = list(numpy.random.default_rng(0).random(30)), [0.5] * 29 + [0.75]
    for values in (spread, hardly):
        first = estimate_mean(values, 3, (0.0, 1.0))
        assert first == estimate_mean(values, 3, (0.0, 1.0))
        assert first != estimate_mean(values, 4, (0.0, 1.0))
    first = estimate_mean(spread, 3)
    monkeypatch.setattr(sample_estimates, "_DRAWN_AT_ONCE", 30_000)
    assert estimate_mean(spread, 3) == first


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
    assert same is not None and -same.low == same.high == pytest.approx(z * 2**0.5 / (tasks + 2))
    half = estimate_mean([0.5] * tasks, 0, (0.0, 1.0))  # Clopper's and Pearson's end, on half of the range
    assert half is not None and half.low == pytest.approx(0.5 * 0.025 ** (1 / tasks), rel=0.1)
    plain = estimate_mean([1.0] * tasks, 0)
    assert plain is not None and plain.low == plain.high == 1.0, "of values with an unknown range"


def test_an_interval_of_eight_values_covers_the_mean() -> None:
    draws = numpy.random.default_rng(1).normal(0.3, 2.0, size=(600, 8))
    ends = [sample_estimates.studentised(one) for one in draws]
    covered = sum(one[0] <= 0.3 <= one[1] for one in ends if one is not None) / len(ends)
    assert covered == pytest.approx(sample_estimates.LEVEL, abs=0.025)
    assert sample_estimates.studentised(draws[0, :3]) is None


def test_counted_resamples_are_what_many_drawn_ones_tend_to(monkeypatch: pytest.MonkeyPatch) -> None:
    times, weights = sample_estimates._all_resamples(8)
    assert len(times) == 6435 and (times.sum(axis=1) == 8).all() and weights.sum() == pytest.approx(1.0)
    values = numpy.random.default_rng(3).normal(0.3, 2.0, size=8)
    exact = sample_estimates.studentised(values)
    monkeypatch.setattr(sample_estimates, "MOST_EXACT", 4)
    monkeypatch.setattr(sample_estimates, "RESAMPLES", 200_000)
    assert sample_estimates.studentised(values, seed=1) == pytest.approx(exact, abs=0.05)
