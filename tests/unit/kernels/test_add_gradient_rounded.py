"""A BF16 sum with stochastic rounding: the kernel against the reference to the bit, no bias, parts as the whole."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.optimizer.add_gradient_rounded import (
    PROGRAM_ELEMENTS,
    add_gradient_rounded,
    add_gradient_rounded_reference,
    add_gradient_rounded_triton,
)
from octetrl.trainer.gradients import chance_key


def zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 2 * PROGRAM_ELEMENTS + 7])
def test_the_kernel_has_the_references_bits(count: int, dtype: torch.dtype) -> None:
    ours, theirs = (torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(2))
    errors = zero(), zero()
    for key in (7, 2**31 - 1):
        gradient = torch.randn(count).to(dtype)
        add_gradient_rounded_triton(ours, gradient, errors[0], key=key, first=300)
        add_gradient_rounded_reference(theirs, gradient, errors[1], key=key, first=300)
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(errors[0], errors[1], rtol=1e-5, atol=0)


def test_a_contribution_far_below_a_bf16_step_is_kept_on_average() -> None:
    sum_, error = torch.ones(20_000).bfloat16(), zero()
    for step in range(100):
        key = chance_key(seed=1, step=step, name="weight")
        add_gradient_rounded(sum_, torch.full_like(sum_, 1e-4), error, key=key)
    assert float(sum_.double().mean()) == pytest.approx(1.01, abs=3e-4)  # to nearest, it would be 1
    off = (sum_.double() - (1 + 100 * float(torch.tensor(1e-4).bfloat16()))).square().sum()
    assert float(error) == pytest.approx(float(off), rel=0.05)  # what it says of itself is its error


def test_a_part_has_the_bits_of_the_whole_and_what_is_not_finite_stays_so() -> None:
    gradient = torch.randn(6, 128)
    gradient[3, 5], gradient[4, 6], gradient[5, 7] = torch.inf, -torch.inf, torch.nan
    whole, part = torch.ones(6, 128).bfloat16(), torch.ones(2, 128).bfloat16()
    add_gradient_rounded(whole, gradient, zero(), key=9)
    add_gradient_rounded(part, gradient[2:4], zero(), key=9, first=256)
    assert torch.equal(whole[2:4], part)
    assert whole[3, 5] == torch.inf and whole[4, 6] == -torch.inf and whole[5, 7].isnan()
    assert int((~whole.isfinite()).sum()) == 3


def test_other_formats_are_refused() -> None:
    with pytest.raises(AssertionError, match="add_gradient_rounded: sum is torch"):
        add_gradient_rounded(torch.zeros(4), torch.zeros(4), zero(), key=1)
