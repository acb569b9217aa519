"""The rule for the best step of a run: the highest value, of a loss the lowest; of equal ones, the earliest step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def lower_is_better(metric: str) -> bool:
    """Whether less of this metric is better: of a loss."""
    return metric.rpartition("/")[2] == "loss"


def best_steps(values: Iterable[tuple[int, float | None]], metric: str = "") -> list[int]:
    """Order steps from the best to the worst. values: (step, value); those without a finite value are left out."""
    measured = [(step, value) for step, value in values if value is not None and math.isfinite(value)]
    sign = 1 if lower_is_better(metric) else -1
    return [step for step, _ in sorted(measured, key=lambda one: (sign * one[1], one[0]))]


def kept_steps(
    values: Mapping[int, float | None], *, keep_last: int, keep_best: int = 0, keep_every: int = 0, metric: str = ""
) -> set[int]:
    """The steps whose checkpoints stay: the last ones, the best by `metric`, and multiples of `keep_every` (0: none).
    values: the metric of each step that has a checkpoint."""
    every = {step for step in values if keep_every and step % keep_every == 0}
    return {*sorted(values)[-keep_last:], *best_steps(values.items(), metric)[:keep_best], *every}
