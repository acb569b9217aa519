"""The gradient of `combine_experts`: what each row of an expert and each routing weight gets from a token's gradient.

    dy[row]          = round(dout * weight)          for each of the token's rows
    dweight[t, slot] = sum over E of dout * y[row]   float32

One program a token reads the gradient once for each of its rows and writes every row of dy exactly once, as each row
belongs to one token. In place of it, torch would launch five kernels for each slot.

T tokens, S experts a token, P = T S rows, E hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_E = 1024


@triton.jit
def _combine_experts_backward_kernel(
    dout_ptr, y_ptr, weight_ptr, row_ptr, dy_ptr, dweight_ptr,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for slot in range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot)
        weight = tl.load(weight_ptr + token * SLOTS + slot)
        sum_E = tl.zeros([BLOCK_E], tl.float32)
        for start in range(0, SIZE, BLOCK_E):
            column_E = start + tl.arange(0, BLOCK_E)
            inside_E = column_E < SIZE
            dout_E = tl.load(dout_ptr + token * SIZE + column_E, mask=inside_E, other=0.0).to(tl.float32)
            y_E = tl.load(y_ptr + row * SIZE + column_E, mask=inside_E, other=0.0).to(tl.float32)
            tl.store(dy_ptr + row * SIZE + column_E, (dout_E * weight).to(dy_ptr.dtype.element_ty), mask=inside_E)
            sum_E += dout_E * y_E
        tl.store(dweight_ptr + token * SLOTS + slot, tl.sum(sum_E, 0))


def combine_experts_backward_triton(
    dout_TE: Tensor, y_PE: Tensor, weight_TS: Tensor, row_TS: Tensor
) -> tuple[Tensor, Tensor]:
    """The launcher."""
    tokens, slots = row_TS.shape
    dy_PE, dweight_TS = torch.empty_like(y_PE), torch.empty_like(weight_TS)
    if tokens:
        _combine_experts_backward_kernel[(tokens,)](
            dout_TE, y_PE, weight_TS, row_TS, dy_PE, dweight_TS,
            SIZE=y_PE.shape[1], SLOTS=slots, BLOCK_E=BLOCK_E, num_warps=4,
        )  # fmt: skip
    return dy_PE, dweight_TS


def combine_experts_backward_reference(
    dout_TE: Tensor, y_PE: Tensor, weight_TS: Tensor, row_TS: Tensor
) -> tuple[Tensor, Tensor]:
    """In plain torch; dy with the same bits."""
    dy_PE, dweight_TS = torch.empty_like(y_PE), torch.empty_like(weight_TS)
    dout_TE = dout_TE.float()
    for slot, row_T in enumerate(row_TS.t()):
        dy_PE[row_T] = (dout_TE * weight_TS[:, slot, None]).to(y_PE.dtype)
        dweight_TS[:, slot] = (dout_TE * y_PE[row_T]).sum(1)
    return dy_PE, dweight_TS


def combine_experts_backward(dout_TE: Tensor, y_PE: Tensor, weight_TS: Tensor, row_TS: Tensor) -> tuple[Tensor, Tensor]:
    """dy [P, E] in y's dtype, and dweight float32 [T, S]. `dout`: the gradient of the sum; weight float32, row int64
    [T, S], each row once. All contiguous."""
    for tensor in (dout_TE, y_PE, weight_TS, row_TS):
        assert tensor.is_contiguous(), "combine_experts_backward: operands must be contiguous"
    run = combine_experts_backward_triton if y_PE.is_cuda else combine_experts_backward_reference
    return run(dout_TE, y_PE, weight_TS, row_TS)
