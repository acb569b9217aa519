"""Means over seeds, and differences between arms that have the same seeds, with bootstrap intervals.

An interval is a studentised bootstrap of the mean of the paired differences d, with N seeds: resample d with
replacement and compute t = (mean of the resample - mean of d) / (standard error of the resample). The interval is
mean - t's upper quantile x s.e. to mean - t's lower quantile x s.e. Up to `MOST_EXACT` seeds all resamples are counted,
each with its probability, so that no chance is in the interval: eight values have 6,435. Above, `RESAMPLES` are drawn.
With eight seeds a percentile bootstrap is too narrow; a test measures that this one covers the mean of a normal
distribution as often as it says. With fewer than four seeds there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy

RESAMPLES = 10_000
MOST_EXACT = 10  # values, with 92,378 resamples
LEVEL = 0.95
FEWEST = 4


@dataclass(frozen=True, slots=True)
class Mean:
    mean: float
    error: float  # standard error; 0 of one value
    count: int


@dataclass(frozen=True, slots=True)
class Difference:
    """arm - reference, over the seeds that both have."""

    mean: float
    error: float
    low: float | None
    high: float | None
    count: int


def mean_of(values: Sequence[float]) -> Mean:
    array = numpy.asarray(values, dtype=numpy.float64)
    return Mean(float(array.mean()), _error(array), len(array))


def paired(arm: Mapping[int, float], reference: Mapping[int, float], seed: int = 0) -> Difference | None:
    """The difference of two arms, each a value by seed; None without a common seed."""
    common = sorted(arm.keys() & reference.keys())
    if not common:
        return None
    differences = numpy.asarray([arm[one] - reference[one] for one in common], dtype=numpy.float64)
    low, high = interval(differences, seed)
    return Difference(float(differences.mean()), _error(differences), low, high, len(differences))


def interval(values: numpy.ndarray, seed: int = 0) -> tuple[float | None, float | None]:
    """Studentised bootstrap interval of the mean; None with fewer than `FEWEST` values."""
    count = len(values)
    if count < FEWEST:
        return None, None
    mean, error = float(values.mean()), _error(values)
    if error == 0:
        return mean, mean
    if count <= MOST_EXACT:
        times, weights = _all_resamples(count)
    else:
        drawn = numpy.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
        times = numpy.stack([numpy.bincount(one, minlength=count) for one in drawn])
        weights = numpy.ones(RESAMPLES)
    means = times @ values / count
    squares = (times * (values - means[:, None]) ** 2).sum(axis=1)
    errors = numpy.sqrt(squares / (count - 1) / count)
    usable = errors > 1e-9 * error  # a resample of one value again and again has no spread
    t = (means[usable] - mean) / errors[usable]
    lower, upper = (_quantile(t, weights[usable], share) for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return mean - upper * error, mean - lower * error


@cache
def _all_resamples(count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Every resample of `count` values: how often it has each value [R, count], and its probability [R]."""
    bars = combinations(range(2 * count - 1), count - 1)  # between `count` stars, in 2 count - 1 places
    ends = numpy.asarray([(-1, *one, 2 * count - 1) for one in bars])
    times = numpy.diff(ends, axis=1) - 1
    factorials = numpy.asarray([math.factorial(one) for one in range(count + 1)], dtype=numpy.float64)
    return times, factorials[count] / factorials[times].prod(axis=1) / float(count) ** count


def _quantile(values: numpy.ndarray, weights: numpy.ndarray, share: float) -> float:
    """The smallest value up to which `share` of the weights lie."""
    order = numpy.argsort(values)
    cumulated = numpy.cumsum(weights[order])
    return float(values[order][numpy.searchsorted(cumulated, share * cumulated[-1])])


def _error(values: numpy.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
