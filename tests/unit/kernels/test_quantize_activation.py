"""The Triton quantiser against the plain-torch one, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.quantize import quantize_activation_reference
from octetrl.kernels.quantize.quantize_activation import quantize_activation, quantize_activation_triton
from tests.unit.kernels.quantize_cases import (
    SHAPES,
    assert_nearly_same_codes,
    assert_same_bytes,
    off_the_grid,
    on_the_grid,
    poisoned,
)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_the_reference(shape: tuple[int, int], power_of_two: bool) -> None:
    for x in (on_the_grid(shape), poisoned(shape), torch.zeros(shape).bfloat16()):
        assert_same_bytes(quantize_activation_triton(x, power_of_two), quantize_activation_reference(x, power_of_two))
    x = off_the_grid(shape)
    assert_nearly_same_codes(
        quantize_activation_triton(x, power_of_two), quantize_activation_reference(x, power_of_two)
    )


def test_the_largest_power_of_two_scale_is_the_references() -> None:
    for value in (2.97e38, 3.0e38, -3.3e38, torch.finfo(torch.bfloat16).max):
        x = torch.full((3, 130), value).bfloat16()
        assert_same_bytes(quantize_activation_triton(x, True), quantize_activation_reference(x, True))


def test_strided_and_float32_input() -> None:
    x = on_the_grid((130, 200))
    for view in (x.t(), x[:, 30:161], x[::2], x.float()):
        assert_same_bytes(quantize_activation_triton(view), quantize_activation_reference(view))


def test_scale_has_the_strides_that_scaled_mm_asks_for() -> None:
    scale = quantize_activation_triton(on_the_grid((256, 384))).scale
    assert scale.stride() == (1, scale.shape[0])


def test_room_is_left_for_a_multiple_of_four_rows_and_the_bytes_are_the_same() -> None:
    x = on_the_grid((253, 384))
    got = quantize_activation_triton(x)
    assert_same_bytes(got, quantize_activation_reference(x))
    assert got.codes.is_contiguous() and got.scale.stride() == (1, 256)
    assert got.codes.untyped_storage().nbytes() == 256 * 384 and got.scale.untyped_storage().nbytes() == 4 * 3 * 256


def test_a_cpu_tensor_takes_the_reference_and_no_rows_are_fine() -> None:
    x = off_the_grid((5, 140))
    assert_same_bytes(quantize_activation(x), quantize_activation_reference(x))
    empty = torch.empty(0, 140, dtype=torch.bfloat16)
    assert_same_bytes(quantize_activation_triton(empty), quantize_activation_reference(empty))
