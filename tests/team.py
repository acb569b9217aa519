"""Several workers in the threads of one process, connected by gloo as processes would be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from octetrl.records import PackedBatch
from octetrl.trainer.peers import Peers, PeersLost, ProcessGroupPeers, join_store, serve_store
from octetrl.trainer.shards import GradientMode, Share

Result = TypeVar("Result")
CPU = torch.device("cpu")


def run_workers(count: int, connect: Callable[..., Peers], work: Callable[[Peers], Result]) -> list[Result]:
    """What `work` returns on each worker, by rank. Raises the first error, one that lost its peers last.
    `connect(store, share)`: a worker's peers."""
    store, address = serve_store("127.0.0.1")

    def on_worker(rank: int) -> Result:
        peers = connect(store if rank == 0 else join_store(address), Share(rank, count))
        try:
            return work(peers)
        finally:
            peers.close()

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(on_worker, rank) for rank in range(count)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeersLost))
    return [future.result() for future in futures]


def run_team(
    count: int,
    work: Callable[[Peers], Result],
    *,
    gradients: GradientMode = "local",
    owners: int | None = None,
    deadline_seconds: float = 60.0,
) -> list[Result]:
    """Workers that each have the whole model. `owners`: of all rows together, if not all workers."""

    def connect(store: object, share: Share) -> Peers:
        return ProcessGroupPeers(
            store, share, CPU, gradients=gradients, owners=owners, deadline_seconds=deadline_seconds
        )

    return run_workers(count, connect, work)


def share_of(batch: PackedBatch, peers: Peers) -> PackedBatch:
    """A worker's micro-batches."""
    rank, count = peers.share.rank, peers.share.count
    return replace(batch, minibatches=tuple(minibatch[rank::count] for minibatch in batch.minibatches))
