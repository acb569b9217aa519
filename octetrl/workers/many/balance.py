"""Which worker runs which micro-batch.

The packing plan follows from the recipe and the batch alone, so any number of workers runs the same micro-batches. Here
they are only dealt out: the most expensive first, each to the worker with the least cost so far. A micro-batch's cost
is linear in its tokens for GEMMs and quadratic in each sequence's for attention. A token of a mixture costs the experts
that it passes through. An optimizer step is dealt by itself, because all workers meet at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octetrl.records import MicroBatch, PackedBatch
from octetrl.shapes.spec import ModelSpec, pair_products, token_weights


@dataclass(frozen=True, slots=True)
class Costs:
    """What a micro-batch costs: multiplications for one token in all matrices of its layers, and for one pair of tokens
    of a sequence in attention. Both are the forward's in ordinary attention (scores and values, half of them masked).
    Latent attention counts for as many as its forward and backward take, at two of seven products forward."""

    token: float
    pair: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Costs:
        return cls(float(token_weights(spec)), pair_products(spec).computed / 7)

    def micro_batch(self, micro_batch: MicroBatch) -> float:
        lengths_B = micro_batch.cu_seqlens_B1.diff().double()
        return float(self.token * lengths_B.sum() + self.pair * lengths_B.square().sum())


def deal(batch: PackedBatch, workers: int, costs: Costs) -> list[PackedBatch]:
    """The part of each worker: its micro-batches in their order, with the whole batch's denominators."""
    parts: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(workers)]
    for minibatch in batch.minibatches:
        owners = shared_out([costs.micro_batch(one) for one in minibatch], workers)
        for worker, part in enumerate(parts):
            part.append(tuple(one for one, owner in zip(minibatch, owners, strict=True) if owner == worker))
    return [replace(batch, minibatches=tuple(part)) for part in parts]


def shared_out(costs: Sequence[float], workers: int, loads: Sequence[float] | None = None) -> list[int]:
    """The worker of each item: the most expensive first, each to the worker with the least so far. `loads`: what each
    has already; None: nothing."""
    owners, loads = [0] * len(costs), [0.0] * workers if loads is None else list(loads)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        owner = min(range(workers), key=lambda worker: (loads[worker], worker))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners
