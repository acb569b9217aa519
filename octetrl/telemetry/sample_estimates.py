"""Estimate pass@k and maj@k of a task from n >= k sampled completions.

pass@k is the probability that at least one of k completions is right. With c of n right it is estimated as

    1 - C(n - c, k) / C(n, k)            (arXiv 2107.03374)

This estimate is unbiased. The simpler 1 - (1 - c / n)^k is too low.

maj@k is the probability that the most frequent answer of k completions is right. It is the mean over subsets of size k:
over all subsets, or over `SUBSETS` random ones if there are more. If several answers are equally frequent, each is
chosen with the same probability. A completion without an answer does not vote. Without any vote the majority is wrong.

**Intervals** of a mean over tasks, at `LEVEL`, from few values that are independent of one another. To compare two
models on the same tasks, the differences per task are the values, so that differences between tasks cancel out.

    wilson           values at the two ends of a range, such as one right or wrong answer a task: 16 right of 16 give
                     0.806 to 1, 15 give 0.717 to 0.989 (E. B. Wilson, Journal of the American Statistical Association
                     22, 1927)
    shifts           differences -1, 0 and 1 of two such values: one more of each sign is added, then a normal interval
                     (D. G. Bonett and R. M. Price, Statistical Methods in Medical Research 21, 2012)
    studentised      any values: resample with replacement, t = (mean of the resample - mean) / (standard error of the
                     resample); the interval is mean - t's upper quantile x s.e. to mean - t's lower quantile x s.e.
    with_unseen      values nearly all equal, whose resamples often have no spread: each end is a quantile of the mean
                     under random weights (Dirichlet, all parameters 1) of the values and of one more value, at that
                     end of the range (N. Gaffke, Mathematical Methods of Statistics 14, 2005)

`studentised` counts all resamples of up to `MOST_EXACT` values, each with its probability, so that no chance is in the
interval: eight values have 6,435. Above, `RESAMPLES` are drawn. A percentile bootstrap would be too narrow.

U distinct values, R resamples.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy

SUBSETS = 2_000
DECIMALS = 12  # to which values are rounded: 2/3 - 1/3 and 1 - 2/3 are equal
RESAMPLES = 10_000
MOST_EXACT = 10  # values, with 92,378 resamples
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
FEWEST = 4
NORMAL = statistics.NormalDist().inv_cdf(1 - TAIL)
_DRAWN_AT_ONCE = 2**22  # numbers

Interval = tuple[float, float]


def wilson(share: float, count: int) -> Interval:
    """The interval of a share of `count`, within 0 and 1. It contains `share`."""
    square = NORMAL**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = NORMAL * math.sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def shifts(up: int, down: int, count: int) -> Interval:
    """The interval of (up - down) / count, within -1 and 1. up, down: values that are 1 and -1."""
    more, less = (up + 1) / (count + 2), (down + 1) / (count + 2)
    half = NORMAL * math.sqrt((more + less - (more - less) ** 2) / (count + 2))
    mean = (up - down) / count
    return max(-1.0, min(mean, more - less - half)), min(1.0, max(mean, more - less + half))


def studentised(values: numpy.ndarray, seed: int = 0) -> Interval | None:
    """Studentised bootstrap interval of the mean; None with fewer than `FEWEST` values."""
    count = len(values)
    if count < FEWEST:
        return None
    mean, error = float(values.mean()), standard_error(values)
    if error == 0:
        return mean, mean
    found = list(_resampled(values, seed))
    means, errors, weights = (numpy.concatenate(column) for column in zip(*found, strict=True))
    usable = errors > 1e-9 * error  # a resample of one value again and again has no spread
    t = (means[usable] - mean) / errors[usable]
    lower, upper = (_quantile(t, weights[usable], share) for share in (TAIL, 1 - TAIL))
    return mean - upper * error, mean - lower * error


def has_spread(values: numpy.ndarray) -> bool:
    """Whether few enough resamples of the values are equal throughout for `studentised`."""
    count = len(values)
    _, times = numpy.unique(values, return_counts=True)
    return count >= FEWEST and bool(((times / count) ** count).sum() <= TAIL)


def with_unseen(values: numpy.ndarray, low: float, high: float, seed: int = 0) -> Interval:
    """The interval of the mean of values between `low` and `high`."""
    found, times = numpy.unique(values, return_counts=True)
    chance = numpy.random.default_rng(seed)
    ends: list[numpy.ndarray] = []
    for size in _pieces(len(found)):
        weights_RU, unseen_R = chance.standard_gamma(times, (size, len(found))), chance.standard_exponential(size)
        sums_R, whole_R = weights_RU @ found, weights_RU.sum(axis=1) + unseen_R
        ends.append(numpy.stack([(sums_R + unseen_R * end) / whole_R for end in (low, high)]))
    lows, highs = numpy.concatenate(ends, axis=1)
    return float(numpy.quantile(lows, TAIL)), float(numpy.quantile(highs, 1 - TAIL))


def standard_error(values: numpy.ndarray) -> float:
    """Standard error of the mean; 0 for one value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0


def _resampled(values: numpy.ndarray, seed: int) -> Iterator[tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]]:
    """Means, standard errors and weights of resamples, float64 [R] each, in pieces that fit in memory."""
    count = len(values)
    if count <= MOST_EXACT:
        times, weights = _all_resamples(count)
        yield *_moments(times, values), weights
        return
    found, shares = numpy.unique(values, return_counts=True)
    chance = numpy.random.default_rng(seed)
    for size in _pieces(len(found)):
        times = chance.multinomial(count, shares / count, size).astype(numpy.float64)
        yield *_moments(times, found), numpy.ones(size)


def _moments(times_RU: numpy.ndarray, values_U: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    count = int(times_RU[0].sum())
    means_R = times_RU @ values_U / count
    squares_R = (times_RU * (values_U - means_R[:, None]) ** 2).sum(axis=1)
    return means_R, numpy.sqrt(squares_R / (count - 1) / count)


def _pieces(width: int) -> Iterator[int]:
    """Numbers of resamples to draw together."""
    at_once = max(1, _DRAWN_AT_ONCE // width)
    return (min(at_once, RESAMPLES - begin) for begin in range(0, RESAMPLES, at_once))


@cache
def _all_resamples(count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Every resample of `count` values: how often it has each value [R, count], and its probability [R]."""
    bars = combinations(range(2 * count - 1), count - 1)  # between `count` stars, in 2 count - 1 places
    ends = numpy.asarray([(-1, *places, 2 * count - 1) for places in bars])
    times = numpy.diff(ends, axis=1) - 1
    factorials = numpy.asarray([math.factorial(number) for number in range(count + 1)], dtype=numpy.float64)
    return times.astype(numpy.float64), factorials[count] / factorials[times].prod(axis=1) / float(count) ** count


def _quantile(values: numpy.ndarray, weights: numpy.ndarray, share: float) -> float:
    """The smallest value up to which `share` of the weights lie."""
    order = numpy.argsort(values)
    cumulated = numpy.cumsum(weights[order])
    return float(values[order][numpy.searchsorted(cumulated, share * cumulated[-1])])


@dataclass(frozen=True, slots=True)
class Vote:
    """The vote of one completion."""

    answer: str | None  # None: the completion has no answer and does not vote
    is_right: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its confidence interval at `LEVEL`."""

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
