"""Both orientations in one read against the two references, interpreted on a CPU."""

from __future__ import annotations

import pytest
import torch

import octetrl.kernels.quantize.quantize_both as module
from octetrl.fp8.quantize import Quantized, quantize_activation_reference, quantize_tokens_reference
from octetrl.kernels.quantize.quantize_both import BothWays, quantize_both, quantize_both_triton
from tests.unit.kernels.quantize_cases import (
    SHAPES,
    assert_nearly_same_codes,
    assert_same_bytes,
    off_the_grid,
    on_the_grid,
    poisoned,
)


def separately(x: torch.Tensor, power_of_two: bool = False, square: bool = False) -> tuple[Quantized, Quantized]:
    rows = quantize_activation_reference(x, power_of_two)
    return rows, quantize_tokens_reference(x, power_of_two, square)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("shape", "blocks_together"), [*((shape, None) for shape in SHAPES), ((300, 140), 2)])
def test_kernel_is_the_two_references(
    shape: tuple[int, int],
    blocks_together: int | None,
    power_of_two: bool,
    square: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last shape has more token blocks than programs take together."""
    if blocks_together is not None:
        monkeypatch.setattr(module, "TOKEN_BLOCKS", blocks_together)
    options = (power_of_two, square)
    for x in (on_the_grid(shape), poisoned(shape), torch.zeros(shape).bfloat16()):
        for got, want in zip(quantize_both_triton(x, *options), separately(x, *options), strict=True):
            assert_same_bytes(got, want)
    x = off_the_grid(shape)
    for got, want in zip(quantize_both_triton(x, *options), separately(x, *options), strict=True):
        assert_nearly_same_codes(got, want)


def test_strided_and_float32_input() -> None:
    x = on_the_grid((130, 200))
    for view in (x.t(), x[:, 30:161], x[::2], x.float()):
        for got, want in zip(quantize_both_triton(view), separately(view), strict=True):
            assert_same_bytes(got, want)


def test_scales_have_the_strides_that_scaled_mm_asks_for() -> None:
    x = on_the_grid((256, 384))
    both, square = quantize_both_triton(x), quantize_both_triton(x, square=True)
    assert both.rows.scale.stride() == (1, 256) and both.tokens.scale.stride() == (1, 384)
    assert square.tokens.scale.shape == (3, 2) and square.tokens.scale.is_contiguous()


def test_a_cpu_tensor_takes_the_references_and_no_rows_are_fine() -> None:
    x = off_the_grid((5, 140))
    for square in (False, True):
        both = quantize_both(x, square=square)
        assert isinstance(both, BothWays)
        for got, want in zip(both, separately(x, square=square), strict=True):
            assert_same_bytes(got, want)
        empty = torch.empty(0, 140, dtype=torch.bfloat16)
        for got, want in zip(quantize_both_triton(empty, square=square), separately(empty, square=square), strict=True):
            assert_same_bytes(got, want)
