"""The fused quantisers, each on one input beside the calls that it replaces.

For the tests of bytes, and for `lab.kernels.quantize`, which times them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_both import quantize_both
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.rows.silu_mul import silu_mul_backward_triton, silu_mul_triton
from octetrl.kernels.rows.silu_mul_backward_quantize import silu_mul_backward_quantize
from tests.gpu.compare import differing

Outputs = list[Quantized]


@dataclass(frozen=True)
class Case:
    """One kernel on one input, beside the calls that it replaces."""

    op: str
    fused: Callable[[], Outputs]
    separate: Callable[[], Outputs] | None
    moved: int  # bytes


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def both_case(tokens: int, width: int, square: bool = False, power_of_two: bool = False) -> Case:
    x = normal(tokens, width)
    return Case(
        f"quantize_both{' square' if square else ''}",
        lambda: [*quantize_both(x, power_of_two, square=square)],
        lambda: [quantize_activation(x, power_of_two), quantize_tokens(x, power_of_two, square)],
        int(tokens * width * (4 + (4 if square else 8) / 128)),
    )


def silu_case(tokens: int, size: int, square: bool, power_of_two: bool = False) -> Case:
    gate_up, dy = 2 * normal(tokens, 2 * size), normal(tokens, size)

    def fused() -> Outputs:
        both, y = silu_mul_backward_quantize(gate_up, dy, power_of_two, square=square)
        return [*both, y]

    def separate() -> Outputs:
        both = quantize_both(silu_mul_backward_triton(gate_up, dy), power_of_two)
        return [*both, quantize_tokens(silu_mul_triton(gate_up), power_of_two, square)]

    name = f"silu_mul_backward_quantize{' square' if square else ''}"
    return Case(name, fused, separate, int(tokens * size * (11 + 20 / 128)))


def any_value(*shape: int) -> Tensor:
    """Bit patterns drawn, not values: every exponent of BF16 occurs. Some NaN and infinities remain."""
    bits = torch.randint(0, 1 << 16, shape, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    keep = bits.isfinite() | (torch.rand(shape) < 1e-2)
    return torch.where(keep, bits, 0)


def differing_of(case: Case) -> int:
    assert case.separate is not None
    return differing(case.fused(), case.separate())
