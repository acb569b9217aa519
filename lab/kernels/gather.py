"""Times gathering the parts of two GPUs through their memory, beside NCCL, both in a CUDA graph.

The shapes are those of a decode step of Qwen3-8B and Llama-3.1-70B, of which each GPU has half: codes with their scales
before o_proj and down_proj, BF16 results behind them, and logits. The bytes are compared first. A time is that of one
gather, the median of replays of a graph with many; GPUs wait for each other, so both have the same. NCCL gathers codes
and scales in two exchanges, as it would in a forward, and leaves the parts one after another: putting the columns side
by side is not in its time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.kernels.clock import Row
from octetrl.kernels.rows.gather_from_peers import PeerMemory, gather_from_peers
from octetrl.trainer.peers import join_store, serve_store
from octetrl.trainer.shards import Share
from octetrl.trainer.tensor_peers import TensorPeers, connect_grid

SIZE = 2
GATHERS, REPLAYS = 40, 15  # of a graph; of each graph
ROWS = (1, 16, 64, 256)
PRECISIONS = {torch.uint8: "fp8", torch.bfloat16: "bf16", torch.float32: "float32"}


class What(NamedTuple):
    """A tensor of one GPU: columns of codes with scales, or of BF16 or float32."""

    name: str
    columns: int
    dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        return self.dtype == torch.uint8


WHATS = (
    What("qwen3-8b o_proj in", 2048, torch.uint8),
    What("qwen3-8b down_proj in", 6144, torch.uint8),
    What("qwen3-8b block out", 2048, torch.bfloat16),
    What("llama-3.1-70b o_proj in", 4096, torch.uint8),
    What("llama-3.1-70b down_proj in", 14_336, torch.uint8),
    What("llama-3.1-70b block out", 4096, torch.bfloat16),
    What("llama-3.1-70b logits", 65_536, torch.float32),
)


class Drawn(NamedTuple):
    values: Tensor
    scales: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


def drawn(what: What, rows: int, rank: int) -> Drawn:
    generator = torch.Generator("cuda").manual_seed(rank)
    octets = torch.randint(0, 256, (rows, what.columns * what.dtype.itemsize), generator=generator, device="cuda")
    room = -(-rows // 4) * 4
    scales = torch.randn(what.columns // 128 * room, generator=generator, device="cuda") if what.has_scales else None
    return Drawn(octets.to(torch.uint8).view(what.dtype), scales)


def check(memory: PeerMemory, what: What, rows: int) -> None:
    parts = [drawn(what, rows, rank) for rank in range(SIZE)]
    mine = parts[memory.rank]
    whole, scales = gather_from_peers(memory, mine.values, flat_F=mine.scales)
    expected = torch.cat([part.values.view(torch.uint8) for part in parts], dim=1)
    assert torch.equal(whole.view(torch.uint8), expected), (what, rows)
    if mine.scales is not None:
        assert torch.equal(scales, torch.cat([part.scales for part in parts if part.scales is not None])), (what, rows)


def by_nccl(collectives: Any, mine: Drawn) -> Callable[[], None]:
    pairs = [(one, one.new_empty(SIZE * one.numel())) for one in mine if one is not None]

    def gather() -> None:
        for own, whole in pairs:
            given = own.view(-1).view(torch.uint8)
            collectives._allgather_base(whole.view(torch.uint8), given).wait()

    return gather


def median_us(gather: Callable[[], object]) -> float:
    """Microseconds of one gather in a graph."""
    gather()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GATHERS):
            gather()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / GATHERS)
    return statistics.median(times[1:])


def measured(peers: TensorPeers) -> list[Row]:
    memory = peers.memory
    assert memory is not None, "the GPUs do not reach each other's memory"
    for what in WHATS:
        for rows in (*ROWS, 3, 37):
            check(memory, what, rows)
    rows_of_table: list[Row] = []
    for what in WHATS:
        for rows in ROWS:
            mine = drawn(what, rows, peers.rank)
            direct = median_us(lambda mine=mine: gather_from_peers(memory, mine.values, flat_F=mine.scales))  # type: ignore[misc]
            nccl = median_us(by_nccl(peers._collectives, mine))
            sent = mine.num_bytes / 1e3
            times = {"us": direct, "nccl_us": nccl, "gb_per_second": sent / direct}
            named = {"precision": PRECISIONS[what.dtype], "workload": what.name, "rows": rows}
            rows_of_table.append({**named, "sent_kb": sent, **times})
    assert not memory.has_failed
    return rows_of_table


def _on_one_gpu(rank: int, address: str, file: str) -> None:
    """The process of one GPU, which is the only one that it sees."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    peers = connect_grid(join_store(address), Share(rank, SIZE), SIZE, torch.device("cuda", 0))
    assert isinstance(peers.group, TensorPeers)
    rows = measured(peers.group)
    if rank == 0:
        Path(file).write_text(json.dumps(rows))
    peers.agree(None, "the end")
    peers.close()


def measure(arguments: argparse.Namespace) -> list[Row]:
    if torch.cuda.device_count() < SIZE:
        raise SystemExit("lab.kernels gather: fewer than two GPUs are visible")
    store, address = serve_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        torch.multiprocessing.spawn(_on_one_gpu, (address, str(file)), nprocs=SIZE)
        assert store is not None
        rows: list[Row] = json.loads(file.read_text())
    return rows
