"""The studentised bootstrap against the normal distribution, and its counted resamples against drawn ones."""

from __future__ import annotations

import numpy
import pytest

from octetrl.telemetry import intervals


def test_an_interval_of_eight_values_covers_the_mean() -> None:
    draws = numpy.random.default_rng(1).normal(0.3, 2.0, size=(600, 8))
    ends = [intervals.studentised(one) for one in draws]
    covered = sum(one[0] <= 0.3 <= one[1] for one in ends if one is not None) / len(ends)
    assert covered == pytest.approx(intervals.LEVEL, abs=0.025)
    assert intervals.studentised(draws[0, :3]) is None


def test_counted_resamples_are_what_many_drawn_ones_tend_to(monkeypatch: pytest.MonkeyPatch) -> None:
    times, weights = intervals._all_resamples(8)
    assert len(times) == 6435 and (times.sum(axis=1) == 8).all() and weights.sum() == pytest.approx(1.0)
    values = numpy.random.default_rng(3).normal(0.3, 2.0, size=8)
    exact = intervals.studentised(values)
    monkeypatch.setattr(intervals, "MOST_EXACT", 4)
    monkeypatch.setattr(intervals, "RESAMPLES", 200_000)
    assert intervals.studentised(values, seed=1) == pytest.approx(exact, abs=0.05)
