"""SiLU·mul's gradient and product, quantised in one kernel, against the separate kernels and the references."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import octetrl.kernels.instructions as instructions
import octetrl.kernels.quantize.quantize_activation as quantize_activation
import octetrl.kernels.quantize.quantize_both as quantize_both
import octetrl.kernels.quantize.quantize_tokens as quantize_tokens
import octetrl.kernels.rows.silu_mul as silu_mul_module
import octetrl.kernels.rows.silu_mul_backward_quantize as module
from octetrl.fp8.quantize import Quantized, quantize_activation_reference, quantize_tokens_reference
from octetrl.kernels.rows.silu_mul import silu_mul, silu_mul_backward_reference
from octetrl.kernels.rows.silu_mul_backward_quantize import (
    silu_mul_backward_quantize,
    silu_mul_backward_quantize_triton,
)
from tests.unit.kernels.fused_row_cases import assert_near, normal
from tests.unit.kernels.quantize_cases import assert_same_bytes

KERNELS = (instructions, quantize_activation, quantize_both, quantize_tokens, silu_mul_module, module)


def three(result: tuple[quantize_both.BothWays, Quantized]) -> tuple[Quantized, Quantized, Quantized]:
    return (*result[0], result[1])


@pytest.mark.parametrize("square", [False, True])
def test_is_the_separate_references(square: bool) -> None:
    gate_up, dy = 2 * normal(200, 2 * 140), normal(200, 140, seed=1)
    rows, tokens, y = three(silu_mul_backward_quantize(gate_up, dy, square=square))
    gradient = silu_mul_backward_reference(gate_up, dy)
    assert_same_bytes(rows, quantize_activation_reference(gradient))
    assert_same_bytes(tokens, quantize_tokens_reference(gradient))
    assert_same_bytes(y, quantize_tokens_reference(silu_mul(gate_up), square=square))


@pytest.mark.parametrize(
    ("shape", "options", "blocks_together"),
    [
        *product([(130, 256)], product([False, True], [False, True]), [None]),
        *product([(1, 128), (128, 128), (40, 100), (0, 128)], [(False, True), (True, False)], [None]),
        ((300, 256), (False, True), 2),  # more token blocks than programs take together
    ],
)
def test_kernel_is_the_separate_kernels(
    shape: tuple[int, int], options: tuple[bool, bool], blocks_together: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted both, so byte for byte; near the references, whose sigmoid is another."""
    power_of_two, square = options
    if blocks_together is not None:
        monkeypatch.setattr(module, "TOKEN_BLOCKS", blocks_together)
    gate_up, dy = 2 * normal(shape[0], 2 * shape[1]), normal(*shape, seed=1)
    gate_up[:, :16] = 0
    dy[shape[0] // 2 :][:1] = 0
    got = three(silu_mul_backward_quantize_triton(gate_up, dy, power_of_two, square))
    gradient = silu_mul_module.silu_mul_backward_triton(gate_up, dy)
    want = (
        *quantize_both.quantize_both_triton(gradient, power_of_two),
        quantize_tokens.quantize_tokens_triton(silu_mul_module.silu_mul_triton(gate_up), power_of_two, square),
    )
    near = three(silu_mul_backward_quantize(gate_up, dy, power_of_two, square=square))
    for ours, theirs, reference in zip(got, want, near, strict=True):
        assert_same_bytes(ours, theirs)
        if not power_of_two:  # a last bit of the sigmoid may double such a scale
            assert_near(ours, reference)


def test_the_order_of_the_programs_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, dy = normal(300, 2 * 256), normal(300, 256, seed=1)
    adjacent = three(silu_mul_backward_quantize_triton(gate_up, dy))
    monkeypatch.setattr(module, "PARTS_ADJACENT", False)
    for ours, theirs in zip(three(silu_mul_backward_quantize_triton(gate_up, dy)), adjacent, strict=True):
        assert_same_bytes(ours, theirs)


def test_a_poisoned_token_poisons_its_blocks_alone() -> None:
    gate_up, dy = normal(130, 2 * 256), normal(130, 256, seed=1)
    dy[129, 200] = torch.nan
    rows, tokens, y = three(silu_mul_backward_quantize_triton(gate_up, dy))
    assert rows.scale.isnan().nonzero().tolist() == [[129, 1], [129, 3]]
    assert tokens.scale.isnan().nonzero().tolist() == [[200, 1], [456, 1]]
    assert tokens.codes[200, 128:].float().isnan().all() and y.scale.isfinite().all()


def test_scales_have_the_strides_that_scaled_mm_asks_for() -> None:
    gate_up, dy = normal(130, 2 * 256), normal(130, 256, seed=1)
    rows, tokens, y = three(silu_mul_backward_quantize_triton(gate_up, dy, square=True))
    assert rows.scale.stride() == (1, 132) and tokens.scale.stride() == (1, 512)
    assert y.scale.shape == (2, 2) and y.scale.is_contiguous()
    with pytest.raises(AssertionError, match="not contiguous"):
        silu_mul_backward_quantize(gate_up, dy.t().contiguous().t())
