"""`gather_from_peers` in Triton's interpreter: workers are processes, and the memory of their GPUs is shared memory."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.kernels.rows import gather_from_peers as module
from octetrl.kernels.rows.gather_from_peers import PeerMemory, gather_from_peers, gather_from_peers_reference
from octetrl.layers import tensor_group
from tests.unit.kernels.interpreting import quicken_interpreter

POLLS = 1 << 20


class Case(NamedTuple):
    """The tensors of one call. `starts`: first columns of the workers, and the number of all columns."""

    rows: int
    starts: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    flat: int = 0

    def parts(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        widths = [right - left for left, right in pairwise(self.starts)]
        shapes = [(self.rows, width * self.dtype.itemsize) for width in widths]
        drawn = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
        return [one.view(self.dtype) for one in drawn]

    def flats(self, seed: int) -> list[Tensor] | None:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(self.flat, generator=generator) for _ in self.starts[1:]] if self.flat else None


def cases(count: int) -> list[Case]:
    def even(width: int) -> tuple[int, ...]:
        return tuple(width * rank for rank in range(count + 1))

    uneven = (*even(96)[:-1], 96 * count + 8)
    wide = (*even(1200)[:-1], 1200 * count - 300)
    return [
        Case(1, even(64)),
        Case(5, even(128), torch.uint8, 4 * 7),
        Case(3, uneven, torch.float32),
        Case(40, even(256)),  # several calls
        Case(7, wide, torch.float32),
        Case(2, even(512), torch.float8_e4m3fn, 8),
        Case(33, even(2), flat=12),
    ]


SIZES = {"PROGRAMS": 3, "TILES": 2, "TILE": 256}


@pytest.fixture
def small_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        monkeypatch.setattr(module, name, size)


@pytest.fixture
def interpreting_processes(small_inbox: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started and call `begin_interpreting` run Triton's kernels in its interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def begin_interpreting() -> None:
    vars(module).update(SIZES)
    quicken_interpreter()


def memory_of(rank: int, inboxes: list[Tensor], flags: list[Tensor], polls: int = POLLS) -> PeerMemory:
    addresses = [torch.tensor([one.data_ptr() for one in tensors]) for tensors in (inboxes, flags)]
    calls, late = torch.zeros(module.PROGRAMS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return PeerMemory(rank, len(inboxes), inboxes[rank], flags[rank], *addresses, calls, late, polls)


def start_workers(_: int, groups: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    """A process that has imported all, and of which the workers are copies."""
    torch.set_num_threads(1)
    begin_interpreting()
    torch.multiprocessing.start_processes(work, (groups,), nprocs=3, start_method="fork")


def work(rank: int, groups: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    """The process of one worker, of one group after the other."""
    for inboxes, flags in groups:
        if rank < len(inboxes):
            gather_all(rank, inboxes, flags)


def gather_all(rank: int, inboxes: list[Tensor], flags: list[Tensor]) -> None:
    memory = memory_of(rank, inboxes, flags)
    for seed, case in enumerate(2 * cases(len(inboxes))):
        parts, flats = case.parts(seed), case.flats(seed)
        out, out_flat = gather_from_peers(memory, parts[rank], case.starts, None if flats is None else flats[rank])
        whole, whole_flat = gather_from_peers_reference(parts, flats)
        assert torch.equal(out.view(torch.uint8), whole.view(torch.uint8)), case
        assert flats is None or torch.equal(out_flat, whole_flat), case
    assert not memory.has_failed


def shared_memory(count: int) -> tuple[list[Tensor], list[Tensor]]:
    inboxes = [torch.full((module.inbox_words(count),), -7, dtype=torch.int32).share_memory_() for _ in range(count)]
    flags = [torch.zeros(module.PROGRAMS, count, dtype=torch.int32).share_memory_() for _ in range(count)]
    return inboxes, flags


def test_every_worker_gets_the_columns_of_all(interpreting_processes: None) -> None:
    torch.multiprocessing.spawn(start_workers, ([shared_memory(count) for count in (2, 3)],))


def test_a_peer_that_writes_nothing_leaves_nan(small_inbox: None) -> None:
    inboxes, flags = shared_memory(2)
    memory = memory_of(0, inboxes, flags, polls=3)
    ones = torch.ones(4, 64, dtype=torch.bfloat16)
    out, _ = gather_from_peers(memory, ones)
    assert memory.has_failed
    assert torch.equal(out[:, :64], ones) and out[:, 64:].isnan().all()


def test_words_that_a_peer_has_written_over_are_missing(small_inbox: None) -> None:
    """The first worker gives up twice, and its third call writes over what it wrote in the first."""
    inboxes, flags = shared_memory(2)
    hasty, slow = memory_of(0, inboxes, flags, polls=1), memory_of(1, inboxes, flags)
    for value in (1.0, 2.0, 3.0):
        gather_from_peers(hasty, torch.full((4, 64), value, dtype=torch.bfloat16))
    out, _ = gather_from_peers(slow, torch.zeros(4, 64, dtype=torch.bfloat16))
    assert slow.has_failed and out[:, :64].isnan().all() and not out[:, 64:].any()


def test_a_peer_that_is_a_call_ahead_writes_beside_what_is_still_read(small_inbox: None) -> None:
    """The second worker has raised its flag of the first call, and has read nothing when the first worker has written
    its words of the second call."""
    inboxes, flags = shared_memory(2)
    fast, slow = memory_of(0, inboxes, flags, polls=1), memory_of(1, inboxes, flags)
    flags[0][:, 1] = 1
    for value in (1.0, 2.0):
        gather_from_peers(fast, torch.full((4, 64), value, dtype=torch.bfloat16))
    for value in (1.0, 2.0):
        out, _ = gather_from_peers(slow, torch.zeros(4, 64, dtype=torch.bfloat16))
        assert (out[:, :64] == value).all() and not out[:, 64:].any()
    assert not slow.has_failed


def test_behind_the_rows_there_is_memory_for_a_multiple_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM reads groups of four rows."""
    monkeypatch.setattr(module, "_launch", lambda *arguments: None)
    memory = memory_of(0, *shared_memory(2))
    for rows, in_memory in ((1, 4), (4, 4), (5, 8)):
        out, _ = gather_from_peers(memory, torch.zeros(rows, 64, dtype=torch.uint8))
        assert out.shape == (rows, 128) and out.untyped_storage().nbytes() == in_memory * 128


@pytest.mark.parametrize(
    ("width", "starts"), [(3, None), (4, (0, 4, 7)), (3, (0, 3, 8))], ids=["all", "a peer's", "its own"]
)
def test_rows_that_are_no_whole_words_are_refused(width: int, starts: tuple[int, ...] | None) -> None:
    memory = memory_of(0, *shared_memory(2))
    with pytest.raises(AssertionError, match="rows are no whole words"):
        gather_from_peers(memory, torch.zeros(2, width, dtype=torch.bfloat16), starts)


class Group:
    """A group of two as its first worker sees it."""

    rank, size = 0, 2

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory


def test_an_embedding_without_a_peers_part_is_nan(small_inbox: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tokens that this worker owns: a wrong number could not be told from a right one."""
    inboxes, flags = shared_memory(2)
    memory = memory_of(0, inboxes, flags, polls=3)
    monkeypatch.setattr(tensor_group, "direct_memory", lambda group, values, widest=None: group.memory)  # as on a GPU
    own = torch.zeros(5, 64, dtype=torch.bfloat16)
    own[1] = torch.randn(64)  # the only token of this worker
    assert tensor_group.sum_of_one(Group(memory), own).isnan().all()  # type: ignore[arg-type]
