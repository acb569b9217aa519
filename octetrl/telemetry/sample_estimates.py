"""Estimate pass@k and maj@k of a task from n >= k sampled completions.

pass@k is the probability that at least one of k completions is right. With c of n right it is estimated as

    1 - C(n - c, k) / C(n, k)            (arXiv 2107.03374)

This estimate is unbiased. The simpler 1 - (1 - c / n)^k is too low.

maj@k is the probability that the most frequent answer of k completions is right. It is the mean over subsets of size k:
over all subsets, or over `SUBSETS` random ones if there are more. If several answers are equally frequent, each is
chosen with the same probability. A completion without an answer does not vote. Without any vote the majority is wrong.

Intervals of a mean over tasks (telemetry/intervals.py). To compare two models on the same tasks, the differences per
task are the values, so that differences between tasks cancel out.

    one right or wrong answer a task          Wilson's: 16 right of 16 give 0.806 to 1, 15 give 0.717 to 0.989
    differences of two such answers           Bonett's and Price's
    other values                              the studentised bootstrap, seeded
    other values, nearly all equal            Gaffke's, which allows for values at the ends of the range
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy

from octetrl.telemetry.intervals import Interval, has_spread, shifts, studentised, wilson, with_unseen

SUBSETS = 2_000
DECIMALS = 12  # of a value of an interval: 2/3 - 1/3 and 1 - 2/3 are equal


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one completion."""

    answer: str | None  # None: the completion has no answer and does not vote
    is_right: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its confidence interval at `intervals.LEVEL`."""

    mean: float
    low: float
    high: float
    tasks: int  # number of tasks in the mean


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate the probability that at least one of `k` completions is right.

    num_right: number of right completions among `num_samples`.
    """
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_samples, num_right, k)
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_right, k)) / subsets


def majority_at_k(votes: Sequence[Vote], k: int, chance: random.Random) -> float:
    """Estimate the probability that the majority of `k` of these completions is right.

    chance: samples the subsets if there are more than `SUBSETS`.
    """
    assert 1 <= k <= len(votes), (len(votes), k)
    subsets: Iterable[Sequence[Vote]] = combinations(votes, k)
    count = math.comb(len(votes), k)
    if count > SUBSETS:
        subsets, count = (chance.sample(votes, k) for _ in range(SUBSETS)), SUBSETS
    return math.fsum(_majority_is_right(subset) for subset in subsets) / count


def _majority_is_right(votes: Sequence[Vote]) -> float:
    """Share of right completions among those with the most frequent answer, or answers if several are tied."""
    counts = Counter(vote.answer for vote in votes if vote.answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    leaders = [vote.is_right for vote in votes if vote.answer is not None and counts[vote.answer] == most]
    return sum(leaders) / len(leaders)


def estimate_mean(values: Sequence[float], seed: int, within: Interval | None = None) -> Estimate | None:
    """Compute mean and interval of one value per task. None: there are no tasks.

    within: the range of the values, and of the interval; None: unknown, and that of the values counts."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    ends = _interval(numpy.round(values, DECIMALS), seed, within)
    low, high = (mean if math.isclose(end, mean, rel_tol=0, abs_tol=10**-DECIMALS) else end for end in ends)
    return Estimate(mean, min(low, mean), max(high, mean), len(values))


def reward_range(*rewards: Iterable[float]) -> Interval:
    """The range of rewards, which may be any: that of these, and at least 0 to 1."""
    known = [0.0, 1.0, *(reward for some in rewards for reward in some)]
    return min(known), max(known)


def _interval(values: numpy.ndarray, seed: int, within: Interval | None) -> Interval:
    low, high = numpy.round(within or (values.min(), values.max()), DECIMALS).tolist()
    at_low, at_high, count = int((values == low).sum()), int((values == high).sum()), len(values)
    if low == high:
        return low, high
    if at_low + at_high == count:
        ends = wilson(at_high / count, count)
        return low + ends[0] * (high - low), low + ends[1] * (high - low)
    if low == -high and at_low + at_high + int((values == 0).sum()) == count:
        ends = shifts(at_high, at_low, count)
        return ends[0] * high, ends[1] * high
    found = studentised(values, seed) if has_spread(values) else None
    if found is None:
        return with_unseen(values, low, high, seed)
    return found if within is None else (max(low, found[0]), min(high, found[1]))
