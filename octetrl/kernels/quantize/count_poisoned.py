"""Count the rows of hidden states that hold a NaN or an infinity. Adds to a counter on the device, without a host read.

    count += number of rows t of hidden_TE with any non-finite element

A NaN or infinity in any layer makes its block non-finite, then its GEMM's row and then the token's residual stream
(fp8/quantize.py). One look behind the last layer therefore finds all of them.

T tokens, E hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.quantize.quantize_activation import magnitude_bits

INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _count_poisoned_kernel(hidden_ptr, count_ptr, SIZE: tl.constexpr, BLOCK_E: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column_E = tl.arange(0, BLOCK_E)
    hidden_E = tl.load(hidden_ptr + token * SIZE + column_E, mask=column_E < SIZE, other=0.0).to(tl.float32)
    if tl.max(magnitude_bits(hidden_E), 0) >= INFINITY_BITS:
        tl.atomic_add(count_ptr, 1, sem="relaxed")


def count_poisoned_triton(hidden_TE: Tensor, count: Tensor) -> None:
    """The kernel's launcher. hidden_TE contiguous."""
    num_tokens, size = hidden_TE.shape
    if num_tokens:
        options = {"enable_fp_fusion": False} if hidden_TE.is_cuda else {}
        block_e = triton.next_power_of_2(size)
        _count_poisoned_kernel[(num_tokens,)](hidden_TE, count, SIZE=size, BLOCK_E=block_e, **options)


def count_poisoned_reference(hidden_TE: Tensor, count: Tensor) -> None:
    """The same in plain torch."""
    count += (~hidden_TE.abs().amax(dim=1).isfinite()).sum()


@torch.no_grad()
def count_poisoned(hidden_TE: Tensor, count: Tensor) -> None:
    """Add the number of poisoned rows to `count`, an int64 scalar on hidden_TE's device."""
    run = count_poisoned_triton if hidden_TE.is_cuda else count_poisoned_reference
    run(hidden_TE.contiguous(), count)
