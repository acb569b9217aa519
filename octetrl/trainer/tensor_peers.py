"""The workers of a tensor-parallel group over torch.distributed, and how groups make a run's workers.

    world = data-parallel x tensor-parallel:   worker w is rank w % T of group w // T

A group runs the same micro-batches. Rows of parameters are owned among the workers with the same tensor rank, one of
each group, because they hold the same rows: they are the `Peers` of trainer/shards.py. `GridPeers` are those peers; it
also knows the group, where all workers of the run must agree.

**Peer memory.** Opens the memory of the other GPUs of a tensor-parallel group, for kernels that read and write it.

Every worker allocates an inbox and flags (kernels/rows/gather_from_peers.py) and sends their CUDA IPC handles to the
others, which map them. That works between processes of one host whose GPUs are peers; each process may see its own GPU
alone. Then all workers gather known values once. If anything fails on one worker, all of them do without.
"""

from __future__ import annotations

import pickle
import socket
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Store, Work

from octetrl.config.cluster import owners_of
from octetrl.kernels.rows.gather_from_peers import PROGRAMS, PeerMemory, gather_from_peers, inbox_words
from octetrl.trainer.peers import ALONE, Peers, ProcessGroupPeers, Running
from octetrl.trainer.shards import Cut, GradientMode, Share

Result = TypeVar("Result")
PHASE = "tensor parallel"
EXCHANGES_IN_FLIGHT = 64  # of a GPU, before the host waits for the oldest: a few layers of a forward


class ExchangePeers(ProcessGroupPeers):
    """Workers that exchange tensors inside a forward. NCCL between GPUs, gloo between CPU processes. On a GPU the host
    does not wait for an exchange; what it launches next does."""

    phase = "context parallel"  # of its exchanges, for errors

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Arguments as those of `ProcessGroupPeers`."""
        self._in_flight: deque[Running] = deque()
        super().__init__(*arguments, **settings)
        while self._in_flight:  # NCCL has connected after this
            self._complete(self._in_flight.popleft())

    @property
    def rank(self) -> int:
        return self.share.rank

    @property
    def size(self) -> int:
        return self.share.count

    def swap(self, sent_B: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        given, sizes = sent_B.to(self._device), (list(received), list(sent))
        taken = given.new_empty(sum(received))
        self._finish(lambda: self._collectives.alltoall_base(taken, given, *sizes), self.phase)
        return taken.to(sent_B.device)

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
        super().close()


class TensorPeers(ExchangePeers):
    """A `TensorGroup` (layers/tensor_group.py). Requests go over gloo, because a record over NCCL would wait for all
    launched forwards. Small tensors travel through the GPUs' memory where they can."""

    phase = PHASE

    def __init__(
        self, store: Store, share: Share, device: torch.device, *, deadline_seconds: float = 600.0, name: str
    ) -> None:
        self._store, self._name = store, name
        super().__init__(store, share, device, deadline_seconds=deadline_seconds, name=name)
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

    def close(self) -> None:
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
    def owners(self) -> Share:
        return self._same_part.owners

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
            owners=owners_of(worker.count // size),
            deadline_seconds=deadline_seconds,
            name=f"part {rank}",
        )
    if size == 1:
        return same_part
    share = Share(rank, size)
    return GridPeers(
        same_part, TensorPeers(store, share, device, deadline_seconds=deadline_seconds, name=f"group {group}")
    )


MEMORY_PHASE = "peer memory"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TRIAL_POLLS = 60_000_000  # some 40 s: a worker may compile the kernel first
POLLS_PER_SECOND = 1_000_000  # at least: a look at a flag takes some 0.6 us
MOST_POLLS = 2_000_000_000
TRIAL_SHAPE = (5, 64)


class OpenedMemory:
    """The memory of a group's GPUs as one worker sees it, while this object lives."""

    def __init__(self, own: Tensor, opened: list[Tensor | None], memory: PeerMemory) -> None:
        self._own, self._opened = own, opened
        self.memory = memory

    def close(self) -> None:
        """Unmap the others' memory. The others do so before this worker's is freed."""
        self._opened.clear()
        torch.cuda.ipc_collect()


def open_peer_memory(peers: Peers, device: torch.device, deadline_seconds: float) -> tuple[OpenedMemory | None, str]:
    """The group's memory, or None and why not. All workers call it; `peers` carries their records over the host."""
    rank, count = peers.share.rank, peers.share.count
    hosts = peers.gather_records(_host(), MEMORY_PHASE)
    if len(set(hosts)) > 1:
        return None, "the workers are on several hosts"
    with torch.cuda.device(device):
        words = inbox_words(count)
        own = torch.zeros(words + PROGRAMS * count, dtype=torch.int32, device=device)  # the flags lie behind the inbox
        torch.cuda.synchronize(device)
        handle, error = _tried(lambda: _handle_of(own))
        error = peers.agree(error, MEMORY_PHASE)
        if error is not None:
            return None, error
        handles = peers.gather_records(handle, MEMORY_PHASE)
        opened, error = _tried(lambda: [None if at == rank else _open(one, device) for at, one in enumerate(handles)])
        error = peers.agree(error, MEMORY_PHASE)
        if error is not None or opened is None:
            return None, error or ""
        addresses = [(own if one is None else one).data_ptr() for one in opened]
        made = OpenedMemory(own, opened, _memory(rank, own, words, addresses, TRIAL_POLLS))
        error = peers.agree(None if _passes(made.memory) else "a trial over the GPUs' memory failed", MEMORY_PHASE)
        if error is not None:
            made.close()
            return None, error
        made.memory = _memory(rank, own, words, addresses, polls_of(deadline_seconds), made.memory.calls)
        return made, ""


def _tried(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """What `work` returns, or why CUDA refuses it."""
    try:
        return work(), None
    except RuntimeError as failure:
        return None, f"a GPU's memory cannot be opened on another: {str(failure).strip().splitlines()[0]}"


def polls_of(deadline_seconds: float) -> int:
    """How often a program looks at a flag before it gives up: about the deadline."""
    return min(MOST_POLLS, int(deadline_seconds * POLLS_PER_SECOND))


def _memory(
    rank: int, own: Tensor, words: int, addresses: list[int], polls: int, calls: Tensor | None = None
) -> PeerMemory:
    count, device = len(addresses), own.device
    return PeerMemory(
        rank=rank,
        count=count,
        inbox=own[:words],
        flags=own[words:],
        inbox_P=torch.tensor(addresses, dtype=torch.int64, device=device),
        flags_P=torch.tensor([one + words * own.element_size() for one in addresses], dtype=torch.int64, device=device),
        calls=torch.zeros(PROGRAMS, dtype=torch.int32, device=device) if calls is None else calls,
        late=torch.zeros(1, dtype=torch.int32, device=device),
        polls=polls,
    )


def _passes(memory: PeerMemory) -> bool:
    """Whether known values of all workers arrive, in both slots."""

    def values(rank: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        return torch.randint(0, 1 << 30, TRIAL_SHAPE, generator=generator, dtype=torch.int32)

    for seed in range(4):
        found, _ = gather_from_peers(memory, values(memory.rank, seed).to(memory.inbox.device))
        expected = torch.cat([values(rank, seed) for rank in range(memory.count)], dim=1)
        if not torch.equal(found.cpu(), expected):
            return False
    return not memory.has_failed


def _host() -> str:
    """Names this host: containers of one host may share its boot id, those of several may share a name."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def _handle_of(tensor: Tensor) -> list[Any]:
    """What another process needs to open a tensor's storage, as JSON."""
    parts = tensor.untyped_storage()._share_cuda_()
    return [part.hex() if isinstance(part, bytes) else part for part in parts]


def _open(handle: list[Any], device: torch.device) -> Tensor:
    """Another process's tensor, int32 [words]."""
    _, memory, size, offset, counter, counter_offset, event, waits = handle
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        bytes.fromhex(memory),
        size,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        waits,
    )
    return torch.empty(0, dtype=torch.int32, device=storage.device).set_(storage)
