"""The rows of a batch become a forward's input, in torch and in Triton alike."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows.gather_rows import DecodeRows, gather_rows_reference, gather_rows_triton

PAGE = 16


def rows() -> tuple[torch.Tensor, ...]:
    """Five places and an idle one; a table of 5 pages a row."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 16, 17, 80, 33, 0])
    prompts = torch.tensor([1, 4, 17, 2, 30, 0])
    others = torch.randint(-(1 << 62), 1 << 62, (3, 6), generator=chance)
    integers_5R = torch.stack((others[0].abs() % 100, lengths, prompts, others[1], others[2].abs() % 7))
    fractions_3R = torch.tensor([[1.0, 0.0, 0.7, 1.0, 2.0, 1.0], [1.0, 0.9, 1, 1, 1, 1], [0.0, 0.1, 0, 0, 0, 0]])
    table_RW = torch.randint(0, 1000, (6, 5), dtype=torch.int32, generator=chance)
    return integers_5R, fractions_3R, table_RW


ACTIVE = torch.tensor([3, 0, 4, 1, 2, 5, 5])


def test_what_a_query_is() -> None:
    integers_5R, fractions_3R, table_RW = rows()
    got = gather_rows_reference(ACTIVE, integers_5R, fractions_3R, table_RW, PAGE)
    assert got.position_B.tolist() == [79, 0, 32, 15, 16, 0, 0]
    pages = [table_RW[3, 4], table_RW[0, 0], table_RW[4, 2], table_RW[1, 0], table_RW[2, 1]]
    offsets = [15, 0, 0, 15, 0]
    slots = [int(page) * PAGE + offset for page, offset in zip(pages, offsets, strict=True)]
    assert got.slot_B.tolist() == [*slots, -1, -1]
    assert got.counter_B.tolist() == [78, 0, 3, 12, 0, 0, 0]
    assert got.divisor_B.tolist() == [1.0, 1.0, 2.0, 1.0, pytest.approx(0.7), 1.0, 1.0]
    assert got.length_B.tolist() == [80, 1, 33, 16, 17, 0, 0]


# two drafts behind sequence 3, one behind 1; the stride of the rows is larger than their length
VERIFYING = torch.tensor([[3, 3, 3, 0, 1, 1, 5], [0, 41, 42, 0, 0, 43, 9], [0, 1, 2, 0, 0, 1, 0]])
PLAN = torch.cat((VERIFYING, torch.full((3, 2), -7)), dim=1)[:, :7]


def test_a_draft_is_its_sequence_with_another_query() -> None:
    integers_5R, fractions_3R, table_RW = rows()
    integers_5R[1, 3] = 70
    got = gather_rows_reference(PLAN[0], integers_5R, fractions_3R, table_RW, PAGE, PLAN[1:])
    own = integers_5R[0].tolist()
    assert got.token_B.tolist() == [own[3], 41, 42, own[0], own[1], 43, own[5]]
    assert got.length_B.tolist() == [70, 71, 72, 1, 16, 17, 0]
    assert got.position_B.tolist() == [69, 70, 71, 0, 15, 16, 0]
    assert got.slot_B.tolist()[1] == int(table_RW[3, 4]) * PAGE + 6
    assert got.slot_B.tolist()[5:] == [int(table_RW[1, 1]) * PAGE, -1]
    assert got.counter_B.tolist() == [68, 69, 70, 0, 12, 13, 0]
    assert got.key_B.equal(integers_5R[3, PLAN[0]]) and got.table_BW.equal(table_RW[PLAN[0]])


@pytest.mark.parametrize("drafts", [False, True])
def test_triton_gives_the_same(drafts: bool) -> None:
    state = rows()
    state[0][1, 3] = 70
    arguments = (PLAN[0], *state, PAGE, PLAN[1:]) if drafts else (ACTIVE, *rows(), PAGE)
    ours, reference = gather_rows_triton(*arguments), gather_rows_reference(*arguments)
    for name in DecodeRows._fields:
        one, other = getattr(ours, name), getattr(reference, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
