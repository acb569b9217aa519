"""Add a micro-batch's gradient to a BF16 sum, in place, with stochastic rounding: sum = round(float32(sum) + gradient).

Rounded to nearest, a BF16 sum ignores every contribution below 1/512 of it. Rounded by chance, the sum has no bias. Its
error grows with the root of the number of micro-batches. Each call also adds the squares of its rounding errors to a
total: their expected sum is the squared error of the final sum, because the errors are independent.

The random bits depend only on `key` and the element's number, as in adamw.py: CPU and GPU use the same bits, and a part
of a tensor the bits of the whole. Bytes an element: 2 of the gradient read (4 if it is float32), 2 of the sum read and
2 written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.optimizer.adamw import _mixed, _rounded_by_chance, chance_noise, round_by_chance

PROGRAM_ELEMENTS = 2048
PIECE_ELEMENTS = 1 << 20  # that the CPU form processes at a time (int64 temporaries)
WARPS = 4


@triton.jit(do_not_specialize=["num_elements", "key", "first"])
def _add_gradient_rounded_kernel(sum_ptr, gradient_ptr, error_ptr, num_elements, key, first, ELEMENTS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    element = program * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = element < num_elements
    gradient = tl.load(gradient_ptr + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    total = tl.load(sum_ptr + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32) + gradient
    noise = _mixed((element + first).to(tl.uint32) ^ key.to(tl.uint32))
    rounded = _rounded_by_chance(total, noise >> 16)
    tl.store(sum_ptr + element, rounded, mask=inside, eviction_policy="evict_first")
    error = rounded.to(tl.float32) - total
    tl.store(error_ptr + program, tl.sum(error * error, axis=0))


def add_gradient_rounded_triton(sum_: Tensor, gradient: Tensor, squared_error: Tensor, *, key: int, first: int) -> None:
    """The kernel's launcher: both contiguous."""
    count = sum_.numel()
    if count:
        programs = triton.cdiv(count, PROGRAM_ELEMENTS)
        errors_P = torch.empty(programs, dtype=torch.float32, device=sum_.device)
        options = {"enable_fp_fusion": False} if sum_.is_cuda else {}
        _add_gradient_rounded_kernel[(programs,)](
            sum_, gradient, errors_P, count, key, first, ELEMENTS=PROGRAM_ELEMENTS, num_warps=WARPS, **options
        )
        squared_error.add_(errors_P.sum(dtype=torch.float64))


def add_gradient_rounded_reference(
    sum_: Tensor, gradient: Tensor, squared_error: Tensor, *, key: int, first: int
) -> None:
    """The same in plain torch, a piece at a time."""
    flat, given = sum_.view(-1), gradient.reshape(-1)
    for start in range(0, flat.numel(), PIECE_ELEMENTS):
        piece = slice(start, start + PIECE_ELEMENTS)
        total = flat[piece].float() + given[piece].float()
        noise, _, _ = chance_noise(key, first + start, total.numel())
        rounded = round_by_chance(total, noise.to(total.device))
        flat[piece] = rounded
        squared_error.add_((rounded.float() - total).double().square().sum())


def add_gradient_rounded(sum_: Tensor, gradient: Tensor, squared_error: Tensor, *, key: int, first: int = 0) -> None:
    """Add `gradient` to `sum_`, and the squares of the rounding errors to `squared_error`.

    sum_: BF16, contiguous. gradient: the same shape, any dtype and strides. squared_error: float64 scalar on the same
    device. The random bits depend on `key` in [0, 2^31) and the element's number, counted from `first`.
    """
    assert sum_.shape == gradient.shape, f"add_gradient_rounded: {sum_.shape} and {gradient.shape}"
    assert sum_.dtype == torch.bfloat16 and sum_.is_contiguous(), f"add_gradient_rounded: sum is {sum_.dtype}"
    assert 0 <= key < 1 << 31 and sum_.numel() + first < 1 << 31, f"add_gradient_rounded: key {key}"
    add = add_gradient_rounded_triton if sum_.is_cuda else add_gradient_rounded_reference
    add(sum_, gradient.contiguous(), squared_error, key=key, first=first)
