"""Means over seeds, and differences between arms that have the same seeds, with bootstrap intervals.

An interval is a studentised bootstrap of the mean of the paired differences d, with N seeds: resample d with
replacement `RESAMPLES` times and compute t = (mean of the resample - mean of d) / (standard error of the resample). The
interval is mean - t's upper quantile x s.e. to mean - t's lower quantile x s.e. With eight seeds a percentile bootstrap
is too narrow; a test measures that this one covers the mean of a normal distribution as often as it says. With fewer
than four seeds there is no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

RESAMPLES = 10_000
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
    drawn = values[numpy.random.default_rng(seed).integers(count, size=(RESAMPLES, count))]
    errors = drawn.std(axis=1, ddof=1) / count**0.5
    usable = errors > 1e-9 * error  # a resample of one value again and again has no spread
    t = (drawn.mean(axis=1)[usable] - mean) / errors[usable]
    lower, upper = numpy.quantile(t, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return mean - float(upper) * error, mean - float(lower) * error


def _error(values: numpy.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
