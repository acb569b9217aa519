"""`gather_from_peers` in Triton's interpreter: workers are processes, and the memory of their GPUs is shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.kernels.rows import gather_from_peers as module
from octetrl.kernels.rows.gather_from_peers import PeerMemory, gather_from_peers, gather_from_peers_reference
from octetrl.layers import tensor_group

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


def small_inbox() -> None:
    module.PROGRAMS, module.TILES, module.TILE = 3, 2, 256


def memory_of(rank: int, inboxes: list[Tensor], flags: list[Tensor], polls: int = POLLS) -> PeerMemory:
    addresses = [torch.tensor([one.data_ptr() for one in tensors]) for tensors in (inboxes, flags)]
    calls, late = torch.zeros(module.PROGRAMS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return PeerMemory(rank, len(inboxes), inboxes[rank], flags[rank], *addresses, calls, late, polls)


def work(rank: int, inboxes: list[Tensor], flags: list[Tensor]) -> None:
    """The process of one worker."""
    small_inbox()
    memory = memory_of(rank, inboxes, flags)
    for seed, case in enumerate(2 * cases(len(inboxes))):
        parts, flats = case.parts(seed), case.flats(seed)
        out, out_flat = gather_from_peers(memory, parts[rank], case.starts, None if flats is None else flats[rank])
        whole, whole_flat = gather_from_peers_reference(parts, flats)
        assert torch.equal(out.view(torch.uint8), whole.view(torch.uint8)), case
        assert flats is None or torch.equal(out_flat, whole_flat), case
    assert not memory.has_failed


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes that are started run Triton's kernels in its interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sizes = module.PROGRAMS, module.TILES, module.TILE
    small_inbox()
    yield
    module.PROGRAMS, module.TILES, module.TILE = sizes


def shared_memory(count: int) -> tuple[list[Tensor], list[Tensor]]:
    inboxes = [torch.full((module.inbox_words(count),), -7, dtype=torch.int32).share_memory_() for _ in range(count)]
    flags = [torch.zeros(module.PROGRAMS, count, dtype=torch.int32).share_memory_() for _ in range(count)]
    return inboxes, flags


@pytest.mark.parametrize("count", [2, 3])
def test_every_worker_gets_the_columns_of_all(count: int, interpreted: None) -> None:
    torch.multiprocessing.spawn(work, shared_memory(count), nprocs=count)


def wait_in_vain(_: int, inboxes: list[Tensor], flags: list[Tensor]) -> None:
    small_inbox()
    memory = memory_of(0, inboxes, flags, polls=3)
    ones = torch.ones(4, 64, dtype=torch.bfloat16)
    out, _ = gather_from_peers(memory, ones)
    assert memory.has_failed
    assert torch.equal(out[:, :64], ones) and out[:, 64:].isnan().all()


def test_a_peer_that_writes_nothing_leaves_nan(interpreted: None) -> None:
    torch.multiprocessing.spawn(wait_in_vain, shared_memory(2), nprocs=1)


def come_too_late(_: int, inboxes: list[Tensor], flags: list[Tensor]) -> None:
    """The first worker gives up twice, and its third call writes over what it wrote in the first."""
    small_inbox()
    hasty, slow = memory_of(0, inboxes, flags, polls=1), memory_of(1, inboxes, flags)
    for value in (1.0, 2.0, 3.0):
        gather_from_peers(hasty, torch.full((4, 64), value, dtype=torch.bfloat16))
    out, _ = gather_from_peers(slow, torch.zeros(4, 64, dtype=torch.bfloat16))
    assert slow.has_failed and out[:, :64].isnan().all() and not out[:, 64:].any()


def test_words_that_a_peer_has_written_over_are_missing(interpreted: None) -> None:
    torch.multiprocessing.spawn(come_too_late, shared_memory(2), nprocs=1)


def be_a_call_ahead(_: int, inboxes: list[Tensor], flags: list[Tensor]) -> None:
    """The second worker has raised its flag of the first call, and has read nothing when the first worker has written
    its words of the second call."""
    small_inbox()
    fast, slow = memory_of(0, inboxes, flags, polls=1), memory_of(1, inboxes, flags)
    flags[0][:, 1] = 1
    for value in (1.0, 2.0):
        gather_from_peers(fast, torch.full((4, 64), value, dtype=torch.bfloat16))
    for value in (1.0, 2.0):
        out, _ = gather_from_peers(slow, torch.zeros(4, 64, dtype=torch.bfloat16))
        assert (out[:, :64] == value).all() and not out[:, 64:].any()
    assert not slow.has_failed


def test_a_peer_that_is_a_call_ahead_writes_beside_what_is_still_read(interpreted: None) -> None:
    torch.multiprocessing.spawn(be_a_call_ahead, shared_memory(2), nprocs=1)


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


def join_in_vain(_: int, inboxes: list[Tensor], flags: list[Tensor]) -> None:
    small_inbox()
    memory: Any = memory_of(0, inboxes, flags, polls=3)
    tensor_group.direct_memory = lambda group, values, widest=None: group.memory  # as on a GPU
    own = torch.zeros(5, 64, dtype=torch.bfloat16)
    own[1] = torch.randn(64)  # the only token of this worker
    assert tensor_group.sum_of_one(Group(memory), own).isnan().all()  # type: ignore[arg-type]


def test_an_embedding_without_a_peers_part_is_nan(interpreted: None) -> None:
    """Also of tokens that this worker owns: a wrong number could not be told from a right one."""
    torch.multiprocessing.spawn(join_in_vain, shared_memory(2), nprocs=1)
