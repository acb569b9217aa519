"""Rows with a NaN or an infinity are counted, wherever in the row it stands."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.quantize.count_poisoned import count_poisoned_reference, count_poisoned_triton


@pytest.mark.parametrize("count", [count_poisoned_reference, count_poisoned_triton])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_poisoned_rows_are_added_to_the_count(count, dtype: torch.dtype) -> None:
    hidden_TE = torch.randn(6, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden_TE[1, 47], hidden_TE[3, 0], hidden_TE[3, 5] = torch.nan, -torch.inf, torch.inf
    hidden_TE[4, 2] = torch.finfo(dtype).max
    total = torch.tensor(10)
    count(hidden_TE, total)
    assert total == 12
