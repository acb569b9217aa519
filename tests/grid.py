"""Several tensor-parallel groups in the threads of one process, connected by gloo as processes would be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from octetrl.shapes.spec import ModelSpec, why_not_cut
from octetrl.trainer.peers import Peers, PeersLost, join_store, serve_store
from octetrl.trainer.shards import GradientMode, Share
from octetrl.trainer.tensor_peers import connect_grid
from tests.parity.shapes import TINY

Result = TypeVar("Result")
WIDE = {  # of a config.json: two workers can share it
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4136,
}


def run_grid(
    groups: int,
    size: int,
    work: Callable[[Peers], Result],
    *,
    gradients: GradientMode = "local",
    deadline_seconds: float = 60.0,
) -> list[Result]:
    """What `work` returns on each of `groups` x `size` workers, a group's workers one after another."""
    store, address = serve_store("127.0.0.1")

    def on_worker(worker: int) -> Result:
        mine = store if worker == 0 else join_store(address)
        peers = connect_grid(
            mine,
            Share(worker, groups * size),
            size,
            torch.device("cpu"),
            gradients=gradients,
            deadline_seconds=deadline_seconds,
        )
        try:
            return work(peers)
        finally:
            peers.close()

    with ThreadPoolExecutor(groups * size) as threads:
        futures = [threads.submit(on_worker, worker) for worker in range(groups * size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeersLost))
    return [future.result() for future in futures]


def smallest_shape(family: str, size: int) -> ModelSpec:
    """The smallest widths that `size` workers can share: 128 rows of everything each; a short last vocabulary chunk."""
    spec = replace(
        TINY[family],
        num_layers=1,
        hidden_size=128 * size,
        intermediate_size=128 * size,
        num_heads=2 * size,
        num_kv_heads=size,
        head_size=128,
        vocab_size=4096 * (size - 1) + 40,
    )
    assert why_not_cut(spec, size) is None and why_not_cut(spec, 2 * size) is not None
    return spec
