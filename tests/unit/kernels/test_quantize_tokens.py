"""The Triton quantiser against the plain-torch one, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.quantize import quantize_tokens_reference
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens, quantize_tokens_triton
from tests.unit.kernels.quantize_cases import (
    SHAPES,
    assert_nearly_same_codes,
    assert_same_bytes,
    off_the_grid,
    on_the_grid,
    poisoned,
)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (1100, 140)])  # the last: more token blocks than programs take in a row
def test_kernel_is_the_reference(shape: tuple[int, int], power_of_two: bool, square: bool) -> None:
    options = (power_of_two, square)
    for x in (on_the_grid(shape), poisoned(shape), torch.zeros(shape).bfloat16()):
        assert_same_bytes(quantize_tokens_triton(x, *options), quantize_tokens_reference(x, *options))
    x = off_the_grid(shape)
    assert_nearly_same_codes(quantize_tokens_triton(x, *options), quantize_tokens_reference(x, *options))


def test_strided_and_float32_input() -> None:
    x = on_the_grid((130, 200))
    for view in (x.t(), x[:, 30:161], x[::2], x.float()):
        assert_same_bytes(quantize_tokens_triton(view), quantize_tokens_reference(view))


def test_scale_has_the_strides_that_scaled_mm_asks_for() -> None:
    x = on_the_grid((256, 384))
    scale = quantize_tokens_triton(x).scale
    assert scale.stride() == (1, scale.shape[0])
    square = quantize_tokens_triton(x, square=True).scale
    assert square.shape == (3, 2) and square.is_contiguous()


def test_a_cpu_tensor_takes_the_reference_and_no_rows_are_fine() -> None:
    x = off_the_grid((5, 140))
    assert_same_bytes(quantize_tokens(x), quantize_tokens_reference(x))
    empty = torch.empty(0, 140, dtype=torch.bfloat16)
    assert_same_bytes(quantize_tokens_triton(empty), quantize_tokens_reference(empty))
