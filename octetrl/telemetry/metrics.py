"""The metrics of a step: a flat, frozen mapping from metric name to number.

Names are `family/name` in lower case: `reward/mean`, `time/rollout`, `mismatch/gen_kl`. A few have no
family: `loss`, `grad_norm`, `entropy`. A name includes a unit that is not obvious: `_per_second`, `_gb`. Times are in
seconds.

A metric that was not measured in a step is left out; it is never 0 or NaN instead. A measured value that is not finite
is kept, so that it is visible.

Each source of metrics returns its own small mapping, and `merge` joins them. Two sources with the same name are an
error, because one value would be lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from octetrl.system.errors import type_of

MISMATCH = "mismatch/token_mult_prob_error"  # mean over tokens of exp(|log-prob of the engine - of the trainer|)
BETWEEN_STEPS = ("time/evaluate", "time/wait_to_evaluate", "time/checkpoint")  # not in time/step
NAME = re.compile(r"[a-z0-9_.-]+(/[a-z0-9_.-]+)*")


@dataclass(frozen=True, slots=True)
class StepMetrics(Mapping[str, float]):
    """The metrics of one step. `merge` creates it. It is read like a dict."""

    values_by_name: Mapping[str, float]

    @classmethod
    def merge(cls, *mappings: Mapping[str, float]) -> Self:
        """Join the mappings. Raises AssertionError for a repeated name or a value that is not a number."""
        merged: dict[str, float] = {}
        for mapping in mappings:
            for name, value in mapping.items():
                assert NAME.fullmatch(name), f"metric name {name!r} is not family/name in lower case"
                assert name not in merged, f"metric {name!r} is reported twice"
                assert isinstance(value, int | float), f"metric {name!r} is {type_of(value)}, not a number"
                merged[name] = value
        return cls(merged)

    def __getitem__(self, name: str) -> float:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)
