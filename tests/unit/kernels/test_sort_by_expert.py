"""The rows of experts: the kernels (interpreted) against a stable sort, and what the numbers mean."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

import octetrl.kernels.rows.sort_by_expert as op
from octetrl.kernels.rows.sort_by_expert import SortedSlots, sort_by_expert_reference, sort_by_expert_triton

CASES = {  # tokens, slots, experts
    "one token": (1, 8, 128),
    "one slot": (5, 1, 4),
    "no token": (0, 6, 8),
    "odd numbers": (37, 6, 64),
    "experts without rows": (3, 2, 24),
    "no power of two": (29, 5, 12),
}


def chosen(tokens: int, slots: int, experts: int) -> Tensor:
    """Different experts of each token, ascending; low ids are chosen more often."""
    chance = torch.Generator().manual_seed(tokens)
    skew_X = torch.linspace(1, 0, experts)
    return (torch.rand(tokens, experts, generator=chance) + skew_X).topk(slots).indices.sort(1).values


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", [False, True])
def test_the_kernels_sort_as_the_stable_sort(name: str, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if blocks:  # the way of many slots, with several blocks, and several reads of their counts
        for constant, value in (("ONE_TILE", -1), ("BLOCK", 16), ("STEP", 8), ("BLOCKS_READ", 4)):
            monkeypatch.setattr(op, constant, value)
    monkeypatch.setattr(op, "TILES_WRITTEN", tl.constexpr(1))
    tokens, slots, experts = CASES[name]
    if blocks and tokens == 0:
        pytest.skip("no slots are few")
    expert_TS = chosen(tokens, slots, experts)
    found, want = sort_by_expert_triton(expert_TS, experts), sort_by_expert_reference(expert_TS, experts)
    for field in SortedSlots._fields:
        one, other = getattr(found, field), getattr(want, field)
        assert one.dtype == other.dtype and torch.equal(one, other), field


def test_what_the_rows_are() -> None:
    expert_TS = torch.tensor([[0, 3], [1, 3], [0, 1], [3, 4]])
    token_P, row_TS, first_X1, _ = sort_by_expert_reference(expert_TS, 6)
    assert token_P.tolist() == [0, 2, 1, 2, 0, 1, 3, 3]
    assert row_TS.tolist() == [[0, 4], [2, 5], [1, 3], [6, 7]]
    assert first_X1.tolist() == [0, 2, 4, 4, 7, 8, 8]


@pytest.mark.parametrize("skew", [0.0, 0.3, 20.0])
@pytest.mark.parametrize(
    ("tokens", "slots", "experts"),
    [(1, 8, 128), (63, 6, 64), (256, 8, 128), (200, 1, 16), (512, 8, 128), (4096, 8, 128)],
)
def test_every_row_has_one_tile(tokens: int, slots: int, experts: int, skew: float) -> None:
    """With many experts of no row too, the first or the last of them."""
    for towards in (1, -1):
        chance = torch.Generator().manual_seed(tokens)
        liked_X = towards * skew * torch.linspace(1, 0, experts)
        expert_TS = (torch.rand(tokens, experts, generator=chance) + liked_X).topk(slots).indices.sort(1).values
        sorted_slots = sort_by_expert_reference(expert_TS, experts)
        rows = op.rows_of_tiles(tokens * slots, experts)
        bounds = sorted_slots.first_X1.tolist()
        seen: list[int] = []
        for expert, start, end in sorted_slots.owner_O3.tolist():
            if expert < experts:
                assert bounds[expert] <= start < end == bounds[expert + 1]
                seen += range(start, min(start + rows, end))
        assert seen == list(range(tokens * slots))
        if tokens * slots > op.ONE_TILE:  # tiles without rows come last
            assert sorted_slots.owner_O3[:, 0].diff().min() >= 0
