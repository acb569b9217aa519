"""The Triton quantisers against the plain-torch ones, interpreted on a CPU: along the rows, along the tokens, and both
in one read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import octetrl.kernels.quantize.quantize_both as both_module
import octetrl.kernels.quantize.quantize_tokens as tokens_module
from octetrl.fp8.quantize import Quantized, quantize_activation_reference, quantize_tokens_reference
from octetrl.kernels.quantize.quantize_activation import quantize_activation, quantize_activation_triton
from octetrl.kernels.quantize.quantize_both import BothWays, quantize_both, quantize_both_triton
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens, quantize_tokens_triton
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


# The kernel's launcher, what chooses between it and the reference, and the reference.
QUANTISERS: dict[str, tuple[Callable[..., Any], ...]] = {
    "rows": (quantize_activation_triton, quantize_activation, quantize_activation_reference),
    "tokens": (quantize_tokens_triton, quantize_tokens, quantize_tokens_reference),
    "both": (quantize_both_triton, quantize_both, separately),
}
OPTIONS: dict[str, list[dict[str, bool]]] = {"rows": [{}, {"power_of_two": True}]}
OPTIONS["tokens"] = OPTIONS["both"] = [*OPTIONS["rows"], {"square": True}, {"power_of_two": True, "square": True}]
CASES = [(name, options) for name, some in OPTIONS.items() for options in some]


def each(found: Quantized | BothWays | tuple[Quantized, Quantized]) -> tuple[Quantized, ...]:
    return (found,) if isinstance(found, Quantized) else tuple(found)


def assert_each(same: Callable[[Quantized, Quantized], None], got: Any, want: Any) -> None:
    for mine, theirs in zip(each(got), each(want), strict=True):
        same(mine, theirs)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_the_reference(name: str, options: dict[str, bool], shape: tuple[int, int]) -> None:
    kernel, _, reference = QUANTISERS[name]
    for x in (on_the_grid(shape), poisoned(shape), torch.zeros(shape).bfloat16()):
        assert_each(assert_same_bytes, kernel(x, **options), reference(x, **options))
    x = off_the_grid(shape)
    assert_each(assert_nearly_same_codes, kernel(x, **options), reference(x, **options))


@pytest.mark.parametrize(("name", "options"), CASES[2:])
def test_a_program_takes_only_so_many_blocks_of_tokens(
    name: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three are there, and two taken."""
    for module in (tokens_module, both_module):
        monkeypatch.setattr(module, "TOKEN_BLOCKS", 2)
    kernel, _, reference = QUANTISERS[name]
    x = poisoned((300, 140))
    assert_each(assert_same_bytes, kernel(x, **options), reference(x, **options))


def test_the_largest_power_of_two_scale_is_the_references() -> None:
    for value in (2.97e38, 3.0e38, -3.3e38, torch.finfo(torch.bfloat16).max):
        x = torch.full((3, 130), value).bfloat16()
        assert_same_bytes(quantize_activation_triton(x, True), quantize_activation_reference(x, True))


@pytest.mark.parametrize("name", QUANTISERS)
def test_strided_and_float32_input(name: str) -> None:
    kernel, _, reference = QUANTISERS[name]
    x = on_the_grid((130, 200))
    for view in (x.t(), x[:, 30:161], x[::2], x.float()):
        assert_each(assert_same_bytes, kernel(view), reference(view))


def test_scales_have_the_strides_that_scaled_mm_asks_for() -> None:
    x = on_the_grid((256, 384))
    rows, tokens = quantize_both_triton(x)
    for rows_scale in (rows.scale, quantize_activation_triton(x).scale):
        assert rows_scale.stride() == (1, 256)
    for tokens_scale in (tokens.scale, quantize_tokens_triton(x).scale):
        assert tokens_scale.stride() == (1, 384)
    for square in (quantize_both_triton(x, square=True).tokens, quantize_tokens_triton(x, square=True)):
        assert square.scale.shape == (3, 2) and square.scale.is_contiguous()


def test_room_is_left_for_a_multiple_of_four_rows_and_the_bytes_are_the_same() -> None:
    x = on_the_grid((253, 384))
    got = quantize_activation_triton(x)
    assert_same_bytes(got, quantize_activation_reference(x))
    assert got.codes.is_contiguous() and got.scale.stride() == (1, 256)
    assert got.codes.untyped_storage().nbytes() == 256 * 384 and got.scale.untyped_storage().nbytes() == 4 * 3 * 256


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_cpu_tensor_takes_the_reference_and_no_rows_are_fine(name: str, options: dict[str, bool]) -> None:
    kernel, chosen, reference = QUANTISERS[name]
    x, empty = off_the_grid((5, 140)), torch.empty(0, 140, dtype=torch.bfloat16)
    assert_each(assert_same_bytes, chosen(x, **options), reference(x, **options))
    assert_each(assert_same_bytes, kernel(empty, **options), reference(empty, **options))
