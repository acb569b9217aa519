"""What the tests of the fused row kernels share: running them in Triton's interpreter, and judging their codes.

The interpreter rounds to BF16 and to E4M3 in its own way (quantize_cases.py) and takes sums in another order than a
GPU, so here float32 results are compared closely and codes by distance. Bits are compared on a GPU, with the chain
that a kernel replaces (tests/gpu/test_fused_rows.py).
"""

from __future__ import annotations

import pytest
import torch

import octetrl.kernels.attention.kv_codes as kv_codes
import octetrl.kernels.attention.kv_store as kv_store
import octetrl.kernels.attention.qkv_store as qkv_store
import octetrl.kernels.instructions as instructions
import octetrl.kernels.quantize.count_poisoned as count_poisoned
import octetrl.kernels.quantize.quantize_activation as quantize_activation
import octetrl.kernels.rows.add_rms_norm as add_rms_norm
import octetrl.kernels.rows.combine_experts as combine_experts
import octetrl.kernels.rows.silu_mul_quantize as silu_mul_quantize
from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized
from tests.unit.kernels.interpreting import interpret

KERNELS = (
    add_rms_norm, combine_experts, count_poisoned, instructions, kv_codes, kv_store, qkv_store, quantize_activation,
    silu_mul_quantize,
)  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the fused kernels, and the device functions that they call, in Triton's interpreter."""
    interpret(monkeypatch, *KERNELS)


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
