"""What k completions of a task would achieve, estimated from n >= k that were drawn.

    pass@k   the chance that one of k is right:  1 - C(n - c, k) / C(n, k)  with c of n right (arXiv 2107.03374);
             unbiased, unlike 1 - (1 - c / n)^k, which is too low
    maj@k    the chance that the answer most of k agree on is right: the mean over subsets of size k, all of them where
             they are few, else `SUBSETS` drawn by a seed. Answers with equally many votes share the chance equally, and
             a completion without an answer has no vote; where nobody has one, the majority is wrong

The interval of a mean over tasks is a percentile bootstrap: tasks are resampled with replacement `RESAMPLES` times,
with a seed. A difference between two models on the same tasks is the mean of the differences per task, with the same
bootstrap. A task's difficulty then cancels out. With few tasks (below 30, say) such intervals are too narrow.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy

SUBSETS = 2_000
RESAMPLES = 10_000
LEVEL = 0.95
_DRAWN_AT_ONCE = 2**22  # indices


@dataclass(frozen=True, slots=True)
class Vote:
    """Of one completion."""

    answer: str | None  # None: it has none, and no vote
    is_right: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks, and the interval that holds it with a confidence of `LEVEL`."""

    mean: float
    low: float
    high: float
    tasks: int  # that it is a mean over


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that at least one of `k` of `num_samples` completions, `num_right` of them right, is right."""
    assert 0 <= num_right <= num_samples and 1 <= k <= num_samples, (num_samples, num_right, k)
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_right, k)) / subsets


def majority_at_k(votes: Sequence[Vote], k: int, chance: random.Random) -> float:
    """The chance that the majority of `k` of these completions is right. `chance` draws where subsets are many."""
    assert 1 <= k <= len(votes), (len(votes), k)
    subsets: Iterable[Sequence[Vote]] = combinations(votes, k)
    count = math.comb(len(votes), k)
    if count > SUBSETS:
        subsets, count = (chance.sample(votes, k) for _ in range(SUBSETS)), SUBSETS
    return math.fsum(_majority_is_right(subset) for subset in subsets) / count


def _majority_is_right(votes: Sequence[Vote]) -> float:
    """The share of those right among all who gave an answer that no other has more votes than."""
    counts = Counter(vote.answer for vote in votes if vote.answer is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    leaders = [vote.is_right for vote in votes if vote.answer is not None and counts[vote.answer] == most]
    return sum(leaders) / len(leaders)


def estimate_mean(values: Sequence[float], seed: int) -> Estimate | None:
    """Mean and interval of one value a task; None without tasks."""
    if not values:
        return None
    means = _resampled_means(numpy.asarray(values, dtype=numpy.float64), seed)
    low, high = numpy.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(math.fsum(values) / len(values), float(low), float(high), len(values))


def _resampled_means(values: numpy.ndarray, seed: int) -> numpy.ndarray:
    """The mean of each resample, drawn in pieces that fit in memory."""
    generator = numpy.random.default_rng(seed)
    at_once = max(1, _DRAWN_AT_ONCE // len(values))
    pieces = [
        values[generator.integers(len(values), size=(min(at_once, RESAMPLES - begin), len(values)))].mean(axis=1)
        for begin in range(0, RESAMPLES, at_once)
    ]
    return numpy.concatenate(pieces)
