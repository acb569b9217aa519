"""The workers of a tensor-parallel group over torch.distributed, and how groups make a run's workers.

    world = data-parallel x tensor-parallel:   worker w is rank w % T of group w // T

A group runs the same micro-batches. Rows of parameters are owned among the workers with the same tensor rank, one of
each group, because they hold the same rows: they are the `Peers` of trainer/shards.py. `GridPeers` are those peers; it
also knows the group, where all workers of the run must agree.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Store, Work

from octetrl.kernels.rows.gather_from_peers import PeerMemory
from octetrl.trainer.peers import ALONE, OpenedMemory, Peers, ProcessGroupPeers, Running, open_peer_memory
from octetrl.trainer.shards import Cut, GradientMode, Share

PHASE = "tensor parallel"
EXCHANGES_IN_FLIGHT = 64  # of a GPU, before the host waits for the oldest: a few layers of a forward


class TensorPeers(ProcessGroupPeers):
    """A `TensorGroup` (layers/tensor_group.py). NCCL between GPUs, gloo between CPU processes.

    On a GPU the host does not wait for an exchange; what it launches next does. Requests go over gloo, because a record
    over NCCL would wait for all launched forwards. Small tensors travel through the GPUs' memory where they can
    (trainer/peers.py).
    """

    def __init__(
        self, store: Store, share: Share, device: torch.device, *, deadline_seconds: float = 600.0, name: str
    ) -> None:
        self._in_flight: deque[Running] = deque()
        self._store, self._name = store, name
        super().__init__(store, share, device, deadline_seconds=deadline_seconds, name=name)
        while self._in_flight:  # NCCL has connected after this
            self._complete(self._in_flight.popleft())
        self.commands: ProcessGroupPeers = self  # between the hosts; over them no exchange waits for a forward
        self._opened: OpenedMemory | None = None
        if device.type == "cuda":
            self.commands = ProcessGroupPeers(
                store, share, torch.device("cpu"), deadline_seconds=deadline_seconds, name=f"{name} commands"
            )
            self._opened, why_not = open_peer_memory(self.commands, device, deadline_seconds)
            if self._opened is None:
                print(f"decode steps are not captured, because parts of the model travel over NCCL: {why_not}")

    @property
    def rank(self) -> int:
        return self.share.rank

    @property
    def size(self) -> int:
        return self.share.count

    @property
    def memory(self) -> PeerMemory | None:
        return None if self._opened is None else self._opened.memory

    def stack(self, values: Tensor) -> Tensor:
        return self._all_gather(values, PHASE)

    def from_first(self, value: Any) -> Any:
        """The first worker's value, a record of this package, on all workers."""
        sent = pickle.dumps(value) if self.rank == 0 else b""
        return pickle.loads(
            bytes(self.commands.gather(torch.tensor(list(sent), dtype=torch.uint8), "commands")[0].tolist())
        )

    def agree(self, error: str | None, phase: str) -> str | None:
        """PeersLost, too, if a worker did not write its part of an earlier forward in time."""
        if self.memory is not None and self.memory.has_failed:
            raise self._lost(PHASE, self._deadline_seconds, None)
        return super().agree(error, phase)

    def join_default_group(self) -> None:
        """Makes torch.distributed's default group of these workers, for a library that computes by it. Ours is free:
        all our groups are beside it."""
        assert not distributed.is_initialized(), "this process has a default group already"
        distributed.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=PrefixStore(f"{self._name} default", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self._deadline_seconds),
        )

    def exchange(self, parts: Tensor) -> Tensor:
        if not parts.numel():
            return parts
        given = parts.to(self._device).contiguous().view(-1).view(torch.uint8)
        taken = torch.empty_like(given)
        self._finish(lambda: self._collectives.alltoall_base(taken, given, [], []), PHASE)
        return taken.view(parts.dtype).view(parts.shape).to(parts.device)

    def _finish(self, start: Callable[[], Work], phase: str) -> None:
        if self._device.type != "cuda":
            super()._finish(start, phase)
            return
        running = self._start(start, phase)
        running.work.wait()  # later work on the GPU comes after it; this process goes on
        self._in_flight.append(running)
        while len(self._in_flight) > EXCHANGES_IN_FLIGHT:
            self._complete(self._in_flight.popleft())

    def close(self) -> None:
        self._in_flight.clear()
        if self._opened is not None:
            self._opened.close()
        if self.commands is not self:
            self.commands.close()
        super().close()


class GridPeers:
    """`Peers` of a worker that has a part of a model: those with the same part, and its group."""

    def __init__(self, same_part: Peers, group: TensorPeers) -> None:
        self._same_part, self.group = same_part, group

    @property
    def share(self) -> Share:
        return self._same_part.share

    @property
    def worker(self) -> Share:
        return Share(self.share.rank * self.group.size + self.group.rank, self.share.count * self.group.size)

    @property
    def gradients(self) -> GradientMode:
        return self._same_part.gradients

    def sum_to_owners(self, cuts: Sequence[Cut], phase: str) -> list[Tensor]:
        return self._same_part.sum_to_owners(cuts, phase)

    def gather_from_owners(self, cuts: Sequence[Cut], phase: str) -> None:
        self._same_part.gather_from_owners(cuts, phase)

    def sum(self, values_N: Tensor, phase: str) -> Tensor:
        return self._same_part.sum(values_N, phase)

    def maximum(self, values: Tensor, phase: str) -> Tensor:
        return self._same_part.maximum(values, phase)

    def gather(self, values_N: Tensor, phase: str) -> list[Tensor]:
        return self._same_part.gather(values_N, phase)

    def gather_records(self, record: Any, phase: str) -> list[Any]:
        return self._same_part.gather_records(record, phase)

    def agree(self, error: str | None, phase: str) -> str | None:
        """The first error of any worker of the run."""
        return self.group.agree(self._same_part.agree(error, phase), phase)

    def link_speed(self) -> float:
        """Between the workers with the same part of a model, which exchange new weights."""
        return self._same_part.link_speed()

    def sum_in_group(self, values_N: Tensor, phase: str) -> Tensor:
        return self.group.sum(values_N, phase)

    def agree_in_group(self, error: str | None, phase: str) -> str | None:
        return self.group.agree(error, phase)

    def close(self) -> None:
        self._same_part.close()
        self.group.close()


def connect_grid(
    store: Store,
    worker: Share,
    size: int,
    device: torch.device,
    *,
    gradients: GradientMode = "local",
    deadline_seconds: float = 600.0,
) -> Peers:
    """The peers of worker `worker.rank` of `worker.count`, in groups of `size`, through a store that all of them have.

    `device`, `gradients`, `deadline_seconds`: as in `ProcessGroupPeers`.
    """
    assert worker.count % size == 0, f"{worker.count} workers in groups of {size}"
    group, rank = divmod(worker.rank, size)
    same_part: Peers = ALONE
    if worker.count > size:
        same_part = ProcessGroupPeers(
            store,
            Share(group, worker.count // size),
            device,
            gradients=gradients,
            deadline_seconds=deadline_seconds,
            name=f"part {rank}",
        )
    if size == 1:
        return same_part
    share = Share(rank, size)
    return GridPeers(
        same_part, TensorPeers(store, share, device, deadline_seconds=deadline_seconds, name=f"group {group}")
    )
