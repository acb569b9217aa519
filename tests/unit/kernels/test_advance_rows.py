"""Drawn tokens become the next queries; the idle row stays as it is."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows.advance_rows import advance_rows_reference, advance_rows_triton


@pytest.mark.parametrize("advance", [advance_rows_reference, advance_rows_triton])
def test_rows_move_on_and_results_are_packed(advance) -> None:
    integers_5R = torch.arange(25).view(5, 5).clone()
    integers_5R[1] = torch.tensor([7, 8, 9, 10, 0])  # the last row is idle
    before = integers_5R.clone()
    drawn_B, logprob_B = torch.tensor([50, -1, 60, 70, 70]), torch.tensor([-1.5, 0.0, -0.25, -3.0, -3.0])
    bits_2B = advance(drawn_B, logprob_B, torch.tensor([2, 0, 3, 4, 4]), integers_5R)
    assert bits_2B[0].tolist() == drawn_B.tolist()  # -1 is for the host to see
    assert bits_2B[1].view(torch.float32).tolist() == logprob_B.tolist()
    assert integers_5R[0].tolist() == [0, 1, 50, 60, 4]
    assert integers_5R[1].tolist() == [8, 8, 10, 11, 0]
    assert torch.equal(integers_5R[2:], before[2:])
