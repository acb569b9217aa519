"""Several tensor-parallel groups in the threads of one process, connected by gloo as processes would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from octetrl.shapes.model_cuts import why_not_cut
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.peers import Peers
from octetrl.trainer.shards import GradientMode, Share
from octetrl.trainer.tensor_peers import connect_grid
from tests.parity.shapes import TINY
from tests.team import CPU, run_workers

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

    def connect(store: object, share: Share) -> Peers:
        return connect_grid(store, share, size, CPU, gradients=gradients, deadline_seconds=deadline_seconds)

    return run_workers(groups * size, connect, work)


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
