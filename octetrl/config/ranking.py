"""The rule for the best step of a run: the highest value; of equal ones, the earliest step."""

from __future__ import annotations

import math
from collections.abc import Iterable


def best_steps(values: Iterable[tuple[int, float | None]]) -> list[int]:
    """Order steps from the best to the worst. values: (step, value); those without a finite value are left out."""
    measured = [(step, value) for step, value in values if value is not None and math.isfinite(value)]
    return [step for step, _ in sorted(measured, key=lambda one: (-one[1], one[0]))]
