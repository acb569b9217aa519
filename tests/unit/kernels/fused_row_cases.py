"""Inputs of the fused row kernels' tests, and how codes are judged: by distance, as the interpreter rounds some to a
neighbour. Bits are compared on a GPU, with the chain that a kernel replaces (tests/gpu/test_fused_rows.py)."""

from __future__ import annotations

import torch

from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes_of(given: torch.Tensor | Quantized) -> list[bytes]:
    """The bytes of a tensor, or of codes and scales; NaNs are compared too."""
    tensors = given if isinstance(given, Quantized) else (given,)
    return [tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative, by norm: a code may come out a step off, or with a carry missed, twice or half of what it should be."""
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def assert_near(got: Quantized, want: Quantized) -> None:
    """Scales within a rounding or two of BF16, codes by distance."""
    assert got.codes.dtype == want.codes.dtype == E4M3 and got.codes.shape == want.codes.shape
    torch.testing.assert_close(got.scale, want.scale, rtol=2**-6, atol=0)
    assert distance(got.codes, want.codes) < 0.12
