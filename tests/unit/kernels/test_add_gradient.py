"""A gradient is added to a float32 sum as torch adds it, to the bit, whatever its dtype and strides."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.optimizer.add_gradient import PROGRAM_ELEMENTS, add_gradient, add_gradient_triton


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, PROGRAM_ELEMENTS, 2 * PROGRAM_ELEMENTS + 7])
def test_is_torchs_sum_to_the_bit(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sum_ = torch.randn(count, generator=generator)
    gradient = torch.randn(count, generator=generator).to(dtype)
    want = sum_ + gradient
    add_gradient_triton(sum_, gradient)
    assert torch.equal(sum_, want)


def test_strides_and_shapes() -> None:
    sum_, gradient = torch.zeros(3, 5), torch.arange(15.0).bfloat16().view(5, 3).t()
    add_gradient(sum_, gradient)
    assert torch.equal(sum_, gradient.float())
    with pytest.raises(AssertionError, match="add_gradient"):
        add_gradient(sum_, gradient.t())
