"""Opens the memory of the other GPUs of a tensor-parallel group, for kernels that read and write it.

Every worker allocates an inbox and flags (kernels/rows/gather_from_peers.py) and sends their CUDA IPC handles to the
others, which map them. That works between processes of one host whose GPUs are peers; each process may see its own GPU
alone. Then all workers gather known values once. If anything fails on one worker, all of them do without.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from octetrl.kernels.rows.gather_from_peers import PROGRAMS, PeerMemory, gather_from_peers, inbox_words
from octetrl.trainer.peers import Peers

Result = TypeVar("Result")
PHASE = "peer memory"
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
    hosts = peers.gather_records(_host(), PHASE)
    if len(set(hosts)) > 1:
        return None, "the workers are on several hosts"
    with torch.cuda.device(device):
        words = inbox_words(count)
        own = torch.zeros(words + PROGRAMS * count, dtype=torch.int32, device=device)  # the flags lie behind the inbox
        torch.cuda.synchronize(device)
        handle, error = _tried(lambda: _handle_of(own))
        error = peers.agree(error, PHASE)
        if error is not None:
            return None, error
        handles = peers.gather_records(handle, PHASE)
        opened, error = _tried(lambda: [None if at == rank else _open(one, device) for at, one in enumerate(handles)])
        error = peers.agree(error, PHASE)
        if error is not None or opened is None:
            return None, error or ""
        addresses = [(own if one is None else one).data_ptr() for one in opened]
        made = OpenedMemory(own, opened, _memory(rank, own, words, addresses, TRIAL_POLLS))
        error = peers.agree(None if _passes(made.memory) else "a trial over the GPUs' memory failed", PHASE)
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
