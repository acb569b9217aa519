"""What workers exchange, against the tensors of one worker: over gloo, and through shared memory as GPUs do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_activation import empty_rows, quantize_activation
from octetrl.kernels.rows.gather_from_peers import PeerMemory
from octetrl.layers import cut_rows, tensor_group
from octetrl.layers.cut_rows import VocabularyRows
from octetrl.layers.tensor_group import (
    TensorGroup,
    add_in_order,
    join_codes,
    join_columns,
    own_columns,
    sum_over,
    sum_own_columns,
)
from octetrl.shapes import tensor_cut
from tests.grid import run_grid
from tests.unit.kernels.test_gather_from_peers import (
    begin_interpreting,
    interpreting_processes,  # noqa: F401
    memory_of,
    shared_memory,
    small_inbox,  # noqa: F401
)

ROWS = (1, 4, 7)
CHUNK, VOCAB = 8, 37  # five chunks, an incomplete one among them: workers have different shares


class MemoryGroup:
    """A group on GPUs that reach each other's memory, as worker `rank` sees it."""

    def __init__(self, rank: int, size: int, memory: PeerMemory) -> None:
        self.rank, self.size, self.memory = rank, size, memory

    def stack(self, values: Tensor) -> Tensor:
        raise AssertionError("small tensors travel through memory")

    exchange = stack


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def with_room(own: Quantized) -> Quantized:
    """The same operand, with memory for a multiple of four rows, as a kernel writes it."""
    codes, scale = empty_rows(*own.codes.shape, own.codes.device)
    codes.copy_(own.codes.view(torch.uint8))
    scale.copy_(own.scale)
    return Quantized(codes.view(own.codes.dtype), scale)


def assert_joined(group: TensorGroup) -> None:
    """`VOCAB_CHUNK` is CHUNK."""
    for rows in ROWS:
        x_MC = drawn(rows, 256 * group.size).bfloat16()
        own_ML = own_columns(group, x_MC)
        assert torch.equal(join_columns(group, own_ML), x_MC)
        want, own = quantize_activation(x_MC), quantize_activation(own_ML.contiguous())
        for part in (own, with_room(own)):
            joined = join_codes(group, part)
            assert joined.codes.dtype == want.codes.dtype and joined.scale.shape == want.scale.shape
            assert torch.equal(joined.codes.view(torch.uint8), want.codes.view(torch.uint8))
            assert torch.equal(joined.scale, want.scale) and joined.scale.stride(0) == 1
        vocabulary, logits_NV = VocabularyRows(VOCAB, group), drawn(rows, VOCAB)
        assert len(vocabulary.own) != VOCAB // group.size
        assert torch.equal(vocabulary.whole(vocabulary.of(logits_NV)), logits_NV)


def joined_through_memory(rank: int, inboxes: list[Tensor], flags: list[Tensor]) -> None:
    """The process of one worker."""
    begin_interpreting()
    tensor_cut.VOCAB_CHUNK = CHUNK
    module: Any
    for module in (tensor_group, cut_rows):
        module.direct_memory = lambda group, values, widest=None: group.memory  # as on a GPU
    memory = memory_of(rank, inboxes, flags)
    assert_joined(MemoryGroup(rank, len(inboxes), memory))
    assert not memory.has_failed


@pytest.mark.usefixtures("interpreting_processes")
def test_parts_that_travel_through_memory_are_those_of_one_worker() -> None:
    torch.multiprocessing.spawn(joined_through_memory, shared_memory(3), nprocs=3)


@pytest.mark.parametrize("size", [2, 3])
def test_parts_that_travel_over_gloo_are_those_of_one_worker(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cut, "VOCAB_CHUNK", CHUNK)
    run_grid(1, size, lambda peers: assert_joined(peers.group))


def test_sums_are_added_in_the_order_of_ranks() -> None:
    """In float32, in which another order of these numbers has another sum."""
    parts = torch.tensor([[1.0, 2.0**24], [2.0**24, 1.0], [-(2.0**24), 1.0]])
    in_order = [0.0, 2.0**24]
    assert add_in_order(parts).tolist() == in_order and add_in_order(parts.flip(0)).tolist() != in_order

    def summed(group: TensorGroup) -> tuple[Tensor, Tensor]:
        own_MC = parts[group.rank].repeat(4, 3)
        return sum_over(group, own_MC), sum_own_columns(group, own_MC)

    want_MC = torch.tensor(in_order).repeat(4, 3)
    for rank, (whole_MC, own_ML) in enumerate(run_grid(1, 3, lambda peers: summed(peers.group))):
        assert torch.equal(whole_MC, want_MC) and torch.equal(own_ML, want_MC[:, 2 * rank : 2 * rank + 2])


class OnGpu:
    """As much of a tensor on a GPU as the choice between memory and NCCL looks at."""

    is_cuda = True

    def __init__(self, rows: int, columns: int) -> None:
        self.shape, self.nbytes = (rows, columns), rows * columns * 4

    def element_size(self) -> int:
        return 4

    def contiguous(self) -> OnGpu:
        return self


def test_workers_with_unequal_shares_choose_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one would wait in NCCL, the other for the first one's flag. The widest share decides."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cut_rows, "gather_from_peers", lambda *_: ["through memory"])
    memory: Any = object()
    both = [VocabularyRows(16_424, MemoryGroup(rank, 2, memory)) for rank in (0, 1)]
    assert len(both[0].own) < len(both[1].own)

    def way(vocabulary: VocabularyRows, rows: int) -> str:
        logits: Any = OnGpu(rows, len(vocabulary.own))
        try:
            return str(vocabulary.whole(logits))
        except TypeError:  # `pad` wants a tensor
            return "over NCCL"

    ways = {rows: {way(vocabulary, rows) for vocabulary in both} for rows in (1, 254, 255, 256, 257)}
    assert all(len(chosen) == 1 for chosen in ways.values()), ways
    assert ways[1] != ways[257], "both ways occur"
