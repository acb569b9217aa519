"""The sum of experts: the reference against a loop, the kernel (interpreted) against the reference, to the bit."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.rows.combine_experts import combine_experts, combine_experts_triton


@pytest.mark.parametrize("has_shared", [False, True])
def test_the_order_is_that_of_the_slots(has_shared: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    y_PE = torch.randn(30, 1100, generator=generator)
    weight_TS = torch.rand(10, 3, generator=generator)
    row_TS = torch.randperm(30, generator=generator).view(10, 3)
    shared_TE = torch.randn(10, 1100, generator=generator) if has_shared else None
    found_TE = combine_experts(y_PE, weight_TS, row_TS, shared_TE)
    for token in range(10):
        sum_E = torch.zeros(1100)
        for slot in range(3):
            sum_E = sum_E + weight_TS[token, slot] * y_PE[row_TS[token, slot]]
        assert torch.equal(found_TE[token], sum_E if shared_TE is None else sum_E + shared_TE[token])
    assert torch.equal(combine_experts_triton(y_PE, weight_TS, row_TS, shared_TE), found_TE)
