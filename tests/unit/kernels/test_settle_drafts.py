"""Right drafts move a sequence on; against decoding token by token, in torch and in Triton alike."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octetrl.kernels.rows.settle_drafts import settle_drafts_reference, settle_drafts_triton

IDLE = 6
Settle = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BOTH = pytest.mark.parametrize("settle", [settle_drafts_reference, settle_drafts_triton])


def state() -> Tensor:
    integers_5R = torch.arange(35).view(5, 7).clone()
    integers_5R[1] = torch.tensor([7, 8, 9, 10, 11, 12, 0])
    return integers_5R


def one_by_one(drawn: list[int], plan: list[tuple[int, int, int]], integers_5R: Tensor) -> None:
    """What decoding would do that tries the drafts of a sequence one after the other."""
    expected: dict[int, int] = {}
    for (row, draft, offset), token in zip(plan, drawn, strict=True):
        if row == IDLE or (offset > 0 and expected.get(row) != draft):
            expected.pop(row, None)
            continue
        expected[row] = token
        integers_5R[0, row] = token
        integers_5R[1, row] += 1


@BOTH
def test_sequences_move_on_by_their_right_drafts(settle: Settle) -> None:
    draw = random.Random(0)
    for _ in range(20):
        plan = []
        for row in draw.sample(range(IDLE), 4):
            plan += [(row, draw.randrange(3), offset) for offset in range(draw.randint(1, 5))]
        plan += [(IDLE, 99, 0)] * draw.randint(0, 3)
        drawn = [draw.randrange(3) for _ in plan]
        expected, integers_5R = state(), state()
        one_by_one(drawn, plan, expected)
        wide = torch.cat((torch.tensor(plan).t(), torch.full((3, 4), -9)), dim=1)
        logprob_N = torch.randn(len(plan))
        bits_2N = settle(torch.tensor(drawn), logprob_N, wide[:, : len(plan)], integers_5R)
        assert integers_5R.equal(expected)
        assert bits_2N[0].tolist() == drawn and bits_2N[1].equal(logprob_N.view(torch.int32))


@BOTH
def test_nothing_moves_if_a_row_was_not_finite(settle: Settle) -> None:
    plan_3N = torch.tensor([[2, 2, 0, IDLE], [0, 5, 0, 0], [0, 1, 0, 0]])
    for drawn in ([5, 6, -1, 3], [5, -1, 6, 3], [-1, 5, 6, 3]):
        integers_5R = state()
        bits_2N = settle(torch.tensor(drawn), torch.zeros(4), plan_3N, integers_5R)
        assert integers_5R.equal(state()) and bits_2N[0].tolist() == drawn
    integers_5R = state()
    settle(torch.tensor([5, 6, 8, -1]), torch.zeros(4), plan_3N, integers_5R)  # an idle row is nobody's
    assert integers_5R[:2].tolist() == [[8, 1, 6, 3, 4, 5, 6], [8, 8, 11, 10, 11, 12, 0]]
