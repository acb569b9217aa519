"""Means over seeds, and differences between arms that have the same seeds, with bootstrap intervals.

An interval is a studentised bootstrap of the mean of the paired differences (telemetry/sample_estimates.py). With
fewer than four seeds there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from octetrl.telemetry.sample_estimates import standard_error, studentised


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
    return Mean(float(array.mean()), standard_error(array), len(array))


def paired(arm: Mapping[int, float], reference: Mapping[int, float], seed: int = 0) -> Difference | None:
    """The difference of two arms, each a value by seed; None without a common seed."""
    common = sorted(arm.keys() & reference.keys())
    if not common:
        return None
    differences = numpy.asarray([arm[one] - reference[one] for one in common], dtype=numpy.float64)
    low, high = studentised(differences, seed) or (None, None)
    return Difference(float(differences.mean()), standard_error(differences), low, high, len(differences))
