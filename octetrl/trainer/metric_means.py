"""Means of the metrics of one `train` call, each over its own items.

An item is what a metric has a value for: a trained token, or a preference pair. Every item of the call counts once,
whatever micro-batch, minibatch or pass it came from. The token weights and the denominator are the loss's: a mean of
them would change with `algorithm.token_weighting`.

I items of one metric in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MetricMeans:
    """Sums stay on the device, in float64, until `read`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._items: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Values [I] of each metric, from one micro-batch."""
        for name, values_I in metrics.items():
            total = values_I.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._items[name] = self._items.get(name, 0) + values_I.numel()

    def read(self) -> dict[str, float]:
        """The mean of each metric that has items, by one transfer from the device."""
        if not self._sums:
            return {}
        totals = torch.stack(list(self._sums.values())).tolist()
        return {name: total / self._items[name] for name, total in zip(self._sums, totals, strict=True)}
