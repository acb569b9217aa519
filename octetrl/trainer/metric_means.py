"""Means of the metrics of one `train` call, each over its own items.

An item is a trained token or a preference pair. Every item of the call counts once, in whatever micro-batch, minibatch
or epoch it was. Token weights do not enter: they belong to the loss, and a weighted mean would change with
`algorithm.token_weighting`.

I items of one metric in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octetrl.trainer.peers import ALONE, Peers


class MetricMeans:
    """Sums of metrics. They stay on the device, in float64, until `read`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._items: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the values [I] of each metric, from one micro-batch."""
        for name, values_I in metrics.items():
            total = values_I.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._items[name] = self._items.get(name, 0) + values_I.numel()

    def read(self, peers: Peers = ALONE) -> dict[str, float]:
        """The mean of each metric over all workers. One transfer from the device."""
        totals = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        own = {name: (total, self._items[name]) for name, total in zip(self._sums, totals, strict=True)}
        sums, items = dict[str, float](), dict[str, int]()
        for record in peers.gather_records(own, "metrics"):
            for name, (total, count) in record.items():
                sums[name] = sums[name] + total if name in sums else total
                items[name] = items.get(name, 0) + count
        return {name: total / items[name] for name, total in sums.items()}
