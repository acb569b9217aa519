"""Programmatic launch: a product's kernel starts, and requests its weight, while the kernel in front still runs.

Only few_rows_gluon.py starts early. It waits for the end of the kernel in front before it reads or writes anything but
its weight, and all its programs wait. That kernel therefore may read what the product overwrites, and whatever follows
the product starts behind both. The kernels in front say at their start that the next one may be launched. Without that
hint the product starts when they end, and if the next kernel is an ordinary one the hint does nothing.

The kernel in front must not write the weight, nor have started early itself without waiting. Only the rollout's forward
asks for it (models/blocks/products.py): there, weights are written between forwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from octetrl.kernels.gluon import has_gluon

MOST_ROWS = 64  # of products that may start early


def lets_next_start(x: Tensor) -> bool:
    """Whether a kernel over the rows of `x` gives the hint: few of them, on Hopper."""
    return x.is_cuda and x.shape[0] <= MOST_ROWS and has_gluon(x.device)


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """The hint, at a kernel's start."""
    if EARLY:
        gdc_launch_dependents()
