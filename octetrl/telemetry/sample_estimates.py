"""Estimate pass@k and maj@k of a task from n >= k sampled completions.

pass@k is the probability that at least one of k completions is right. With c of n right it is estimated as

    1 - C(n - c, k) / C(n, k)            (arXiv 2107.03374)

This estimate is unbiased. The simpler 1 - (1 - c / n)^k is too low.

maj@k is the probability that the most frequent answer of k completions is right. It is the mean over subsets of size k:
over all subsets, or over `SUBSETS` random ones if there are more. If several answers are equally frequent, each is
chosen with the same probability. A completion without an answer does not vote. Without any vote the majority is wrong.

The interval of a mean over tasks is a percentile bootstrap: tasks are resampled with replacement `RESAMPLES` times,
with a seed. To compare two models on the same tasks, the differences per task are resampled. Differences between tasks
then cancel out. With few tasks (fewer than about 30) the intervals are too narrow.

If all n tasks have the same value, resampling shows no spread. Where the range of the values is known, the interval
then allows a share z^2 / (n + z^2) of tasks at either end of the range: the upper end of Wilson's score interval of 0
tasks in n (E. B. Wilson, Journal of the American Statistical Association 22, 1927). 16 right of 16 give 0.806 to 1.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy

SUBSETS = 2_000
RESAMPLES = 10_000
LEVEL = 0.95
_NORMAL = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
_DRAWN_AT_ONCE = 2**22  # number of indices sampled together


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


def estimate_mean(values: Sequence[float], seed: int, within: tuple[float, float] | None = None) -> Estimate | None:
    """Compute mean and interval of one value per task. None: there are no tasks. within: the range of the values."""
    if not values:
        return None
    if within is not None and min(values) == max(values):
        others = _NORMAL**2 / (len(values) + _NORMAL**2)
        low, high = (values[0] + others * (end - values[0]) for end in within)
        return Estimate(values[0], low, high, len(values))
    means = _resampled_means(numpy.asarray(values, dtype=numpy.float64), seed)
    low, high = numpy.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(math.fsum(values) / len(values), float(low), float(high), len(values))


def _resampled_means(values: numpy.ndarray, seed: int) -> numpy.ndarray:
    """Compute the mean of each resample, in batches that fit in memory."""
    generator = numpy.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // len(values))
    pieces = [
        values[generator.integers(len(values), size=(min(at_once, RESAMPLES - begin), len(values)))].mean(axis=1)
        for begin in range(0, RESAMPLES, at_once)
    ]
    return numpy.concatenate(pieces)
