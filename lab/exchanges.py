"""Counts what many workers exchange: collectives of a publication, and the padding of a gradient exchange.

    python -m lab.exchanges        # rewrites the table of docs/scale.md

The workers' own code runs (trainer/peers.py), with tensors that have shapes and no memory, over collectives that only
count. All workers do the same, so one of them is enough.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from octetrl.config.cluster import owners_of
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import OptimizerConfig
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.trainer.peers import ProcessGroupPeers
from octetrl.trainer.shards import Cut, Share
from octetrl.trainer.shared_weights import optimizer_of

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- by hand: python -m lab.exchanges -->", "<!-- end of exchanges -->"
MODELS = ("qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b", "llama-3.1-70b")
WORKERS = (8, 24, 64, 96, 1024)
META = torch.device("meta")


@dataclass(frozen=True)
class Exchanges:
    """Of one update of `owners` workers that own all rows together, and of all other workers.

    `published`: collectives that send new weights. `summed`: those that add gradients. `padding`: elements that a
    gradient exchange adds, over those of the model.
    """

    owners: int
    published: int
    summed: int
    padding: float


class _Counts:
    """Collectives that do nothing but count: how many, and the elements of what they add."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.added = 0

    def wait(self, *_: object) -> bool:
        return True

    def _reduce_scatter_base(self, _: Tensor, given: Tensor) -> _Counts:
        self.added += given.numel()
        return self._one("add")

    def allreduce(self, _: Sequence[Tensor]) -> _Counts:
        return self._one("add")

    def _allgather_base(self, *_: Tensor) -> _Counts:
        return self._one("publish")

    def broadcast(self, *_: object) -> _Counts:
        return self._one("publish")

    def _one(self, kind: str) -> _Counts:
        self.calls[kind] += 1
        return self


class _CountingPeers(ProcessGroupPeers):
    """The first of `workers` workers."""

    def __init__(self, workers: int) -> None:
        self.counts = _Counts()
        self._known: dict[object, tuple[list[Tensor], int, int]] = {}
        super().__init__(HashStore(), Share(0, workers), META, owners=owners_of(workers))

    def _connected(self, store: Store, share: Share) -> Any:
        return self.counts

    def sum_to_owners(self, cuts: Sequence[Cut], phase: str) -> list[Tensor]:
        """The count of equal buckets, such as those of other layers, is repeated."""
        key = tuple((cut.tensor.shape, cut.rows) for cut in cuts)
        if key not in self._known:
            calls, added = self.counts.calls["add"], self.counts.added
            sums = super().sum_to_owners(cuts, phase)
            self._known[key] = sums, self.counts.calls["add"] - calls, self.counts.added - added
            return sums
        sums, calls, added = self._known[key]
        self.counts.calls["add"] += calls
        self.counts.added += added
        return sums


def count_exchanges(model: str, workers: int) -> Exchanges:
    """For a preset that is trained in `fp8_full`, with `cluster.gradients: local`."""
    spec = spec_from_config(preset_config(model) | {"max_position_embeddings": 1024})  # a short table of angles
    peers = _CountingPeers(workers)
    decoder = Decoder(spec, precision_policy(spec, Fp8Config(rollout=True, train=True)), "train", device=META)
    optimizer, weights = optimizer_of(decoder, OptimizerConfig(), seed=0, peers=peers)
    optimizer.gradients.finish()
    weights._gather()
    elements, calls = sum(one.numel() for one in optimizer.parameters.values()), peers.counts.calls
    return Exchanges(peers.owners.count, calls["publish"], calls["add"], peers.counts.added / elements)


def table(counts: dict[tuple[str, int], Exchanges]) -> Iterator[str]:
    """Its lines, of the counts by model and workers."""
    models = list(dict.fromkeys(model for model, _ in counts))
    yield f"| workers | groups × owners | {' | '.join(f'`{model}`' for model in models)} |"
    yield "|---" * (2 + len(models)) + "|"
    for workers in dict.fromkeys(workers for _, workers in counts):
        row = [counts[model, workers] for model in models]
        owners = {one.owners for one in row}.pop()
        cells = [f"{one.published}, {one.padding:.3f}" for one in row]
        yield f"| {workers:,} | {workers // owners} × {owners} | {' | '.join(cells)} |"


def with_table(page: str, counts: dict[tuple[str, int], Exchanges]) -> str:
    """The page with these counts."""
    own = "\n".join([BEGIN, *table(counts), END])
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: own, page, flags=re.DOTALL)


if __name__ == "__main__":
    found = {(model, workers): count_exchanges(model, workers) for workers in WORKERS for model in MODELS}
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    print("\n".join(table(found)))
