"""What an H200 reaches: the rates that the benches compare with. Measured, not from a data sheet."""

from __future__ import annotations

MEMORY_BYTES_PER_SECOND = 4.3e12  # most kernels; a few reach 4.54e12 (docs/figures.md)
BF16_FLOPS = 790e12  # per second, of a large GEMM
