"""Counters of kept rows are added up, those of the forward are cleared, in torch and in Triton alike."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows.count_kept_rows import count_kept_rows_reference, count_kept_rows_triton


@pytest.mark.parametrize("count", [count_kept_rows_reference, count_kept_rows_triton])
@pytest.mark.parametrize(("num_rows", "width"), [(0, 5), (3, 70), (20, 5), (37, 130)])
def test_kept_rows_count_once(count, num_rows: int, width: int) -> None:
    chance = torch.Generator().manual_seed(0)
    counters_RI = torch.randint(0, 1 << 40, (40, width), generator=chance)
    kept_R1 = torch.randint(0, 2, (41,), generator=chance)
    kept_R1[-1] = num_rows
    total_I = torch.arange(width)
    expected_I = torch.arange(width)
    for row in range(num_rows):
        if kept_R1[row]:
            expected_I += counters_RI[row]
    behind = counters_RI[num_rows:].clone()
    count(counters_RI, kept_R1, total_I)
    assert total_I.equal(expected_I)
    assert not counters_RI[:num_rows].any() and counters_RI[num_rows:].equal(behind)
    count(counters_RI, kept_R1, total_I)
    assert total_I.equal(expected_I)
