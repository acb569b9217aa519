"""The metrics of a step: a flat, frozen mapping from metric name to number.

Names are `family/name` in lower case (`reward/mean`, `time/rollout`, `mismatch/gen_kl`; `loss` and `grad_norm` stand
alone), with the unit in the name where it isn't plain: `_per_second`, `_gb`. Times are seconds. A metric that could not
be measured in a step is left out, never 0 and never NaN; a number that came out non-finite is kept, so that it is seen.

Every maker returns its own small mapping and `merge` joins them; two makers of one name would hide each other, so that
is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")


@dataclass(frozen=True, slots=True)
class StepMetrics(Mapping[str, float]):
    """The metrics of one step; made by `merge`, read like a dict."""

    values_by_name: Mapping[str, float]

    @classmethod
    def merge(cls, *mappings: Mapping[str, float]) -> Self:
        """Join the mappings. A name given twice, or a value that is no number, is our bug (AssertionError)."""
        merged: dict[str, float] = {}
        for mapping in mappings:
            for name, value in mapping.items():
                assert NAME.fullmatch(name), f"metric name {name!r} is not family/name in lower case"
                assert name not in merged, f"metric {name!r} is reported by two makers"
                assert isinstance(value, int | float), f"metric {name!r} is a {type(value).__name__}, not a number"
                merged[name] = value
        return cls(merged)

    def __getitem__(self, name: str) -> float:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)
