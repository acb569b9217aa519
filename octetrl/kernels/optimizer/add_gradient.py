"""Add a micro-batch's gradient to the float32 sum of an optimizer step, in place: sum += gradient.

Each element is rounded once, so the bits equal those of torch's `add_`. torch converts BF16 on the way and reaches two
thirds of the memory bandwidth; every weight passes here once for each micro-batch. Bytes an element: 2 of the gradient
read, 4 of the sum read and 4 written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PROGRAM_ELEMENTS = 2048
WARPS = 4


@triton.jit(do_not_specialize=["num_elements"])
def _add_gradient_kernel(sum_ptr, gradient_ptr, num_elements, ELEMENTS: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = element < num_elements
    gradient = tl.load(gradient_ptr + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    total = tl.load(sum_ptr + element, mask=inside, other=0.0, eviction_policy="evict_first") + gradient
    tl.store(sum_ptr + element, total, mask=inside, eviction_policy="evict_first")


def add_gradient_triton(sum_: Tensor, gradient: Tensor) -> None:
    """The kernel's launcher: both contiguous."""
    count = sum_.numel()
    if count:
        _add_gradient_kernel[(triton.cdiv(count, PROGRAM_ELEMENTS),)](
            sum_, gradient, count, ELEMENTS=PROGRAM_ELEMENTS, num_warps=WARPS
        )


def add_gradient_reference(sum_: Tensor, gradient: Tensor) -> None:
    """The same in plain torch."""
    sum_.add_(gradient)


def add_gradient(sum_: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `sum_`. sum_: float32. gradient: the same shape, any dtype and strides."""
    assert sum_.shape == gradient.shape, f"add_gradient: {sum_.shape} and {gradient.shape}"
    flat = sum_.is_contiguous() and gradient.is_contiguous()
    add = add_gradient_triton if sum_.is_cuda and flat else add_gradient_reference
    add(sum_, gradient)
