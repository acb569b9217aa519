"""Several workers in the threads of one process, connected by gloo as processes would be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from octetrl.trainer.peers import Peers, PeersLost, ProcessGroupPeers, join_store, serve_store
from octetrl.trainer.shards import GradientMode, Share

Result = TypeVar("Result")


def run_team(
    count: int, work: Callable[[Peers], Result], *, gradients: GradientMode = "local", deadline_seconds: float = 60.0
) -> list[Result]:
    """What `work` returns on each worker, by rank. Raises the first error, one that lost its peers last."""
    store, address = serve_store("127.0.0.1")

    def on_worker(rank: int) -> Result:
        mine = store if rank == 0 else join_store(address)
        peers = ProcessGroupPeers(
            mine, Share(rank, count), torch.device("cpu"), gradients=gradients, deadline_seconds=deadline_seconds
        )
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
