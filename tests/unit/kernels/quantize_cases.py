"""Inputs of the quantise kernels' tests, of two kinds, because the interpreter rounds some codes to a neighbour.

`on_the_grid` every scaled value is an E4M3 value already, and all bytes must agree. `off_the_grid` scales must agree to
the bit and codes nearly. The kernels' own rounding is judged on a GPU (tests/gpu/test_quantize.py).
"""

from __future__ import annotations

import torch

from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized

SHAPES = [(1, 1), (3, 130), (128, 128), (70, 300), (257, 65)]


def on_the_grid(shape: tuple[int, int]) -> torch.Tensor:
    """Random E4M3 values, ±448 everywhere a block could look for its amax, times 2^-5: the inverse is exactly
    32.
    """
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x80  # NaN codes become -0
    codes[::32], codes[:, ::32] = 0x7E, 0xFE
    return (codes.view(E4M3).float() / 32).bfloat16()


def off_the_grid(shape: tuple[int, int]) -> torch.Tensor:
    """Normal values of very different rows, a zero row and zero columns among them."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=generator) * torch.logspace(-1, 1, shape[0])[:, None]
    x[shape[0] // 2] = 0
    x[:, shape[1] // 3] = 0
    return x.bfloat16()


def poisoned(shape: tuple[int, int]) -> torch.Tensor:
    """On the grid, with a NaN and an infinity."""
    x = on_the_grid(shape)
    x[0, 0], x[-1, -1] = torch.nan, -torch.inf
    return x


def assert_same_bytes(got: Quantized, want: Quantized) -> None:
    assert_same_scale(got, want)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


def assert_nearly_same_codes(got: Quantized, want: Quantized) -> None:
    """Equal scales; codes equal except the interpreter's rounding."""
    assert_same_scale(got, want)
    assert (got.codes.view(torch.uint8) != want.codes.view(torch.uint8)).float().mean() < 0.1


def assert_same_scale(got: Quantized, want: Quantized) -> None:
    assert got.codes.dtype == want.codes.dtype == E4M3
    assert got.codes.shape == want.codes.shape
    assert got.scale.shape == want.scale.shape
    got_bits, want_bits = (q.scale.contiguous().view(torch.int32) for q in (got, want))
    assert torch.equal(got_bits, want_bits)
