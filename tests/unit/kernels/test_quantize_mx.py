"""MXFP8's quantiser against the plain-torch one, interpreted on a CPU, along both dimensions of a matrix."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.mxfp8 import quantize_mx_reference
from octetrl.kernels.quantize.quantize_mx import quantize_mx, quantize_mx_triton
from tests.unit.kernels.quantize_cases import (
    SHAPES,
    assert_nearly_same_codes,
    assert_same_bytes,
    off_the_grid,
    on_the_grid,
    poisoned,
)


@pytest.mark.parametrize("shape", [*SHAPES[:2], (70, 300)])
def test_kernel_is_the_reference(shape: tuple[int, int]) -> None:
    for x in (on_the_grid(shape), poisoned(shape), torch.zeros(shape).bfloat16(), on_the_grid(shape).float()):
        for x_MK in (x, x.t(), x[:, shape[1] // 3 :]):
            assert_same_bytes(quantize_mx_triton(x_MK), quantize_mx_reference(x_MK))
    x = off_the_grid(shape)
    for x_MK in (x, x.t()):
        found = quantize_mx_triton(x_MK)
        assert found.codes.is_contiguous()
        assert_nearly_same_codes(found, quantize_mx_reference(x_MK))


def test_the_ends_of_the_range_are_the_references() -> None:
    for value in (1.2e-38, 2.97e38, -3.3e38):
        x_MK = torch.full((3, 40), value).bfloat16()
        assert torch.equal(quantize_mx_triton(x_MK).scale, quantize_mx_reference(x_MK).scale)


def test_a_cpu_tensor_takes_the_reference_and_no_rows_are_fine() -> None:
    x_MK = off_the_grid((3, 130))
    assert_same_bytes(quantize_mx(x_MK), quantize_mx_reference(x_MK))
    assert quantize_mx_triton(x_MK[:0]).scale.shape == (0, 5)
