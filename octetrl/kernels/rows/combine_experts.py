"""The sum of a token's experts: gather of their rows, weighted sum in one order, one rounding (docs/fp8.md §11).

    out = round(w_1 y_1 + w_2 y_2 + ... + w_S y_S + shared)

The experts are in the order of their ids, w is float32. Product and sum are rounded to float32 separately. A program
computes some columns of one token, so no sum depends on other tokens. In the rollout the next norm's kernel computes
the sum, with the same bits (`add_rms_norm` of an `ExpertSum`).

T tokens, S experts a token, P = T S rows, E hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_E = 1024


class ExpertSum(NamedTuple):
    """The operands of `combine_experts`, for a kernel that computes the sum itself."""

    y_PE: Tensor
    weight_TS: Tensor  # float32
    row_TS: Tensor  # int64
    shared_TE: Tensor | None


@triton.jit
def _combine_experts_kernel(
    y_ptr, weight_ptr, row_ptr, shared_ptr, out_ptr,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside_E = column_E < SIZE
    sum_E = tl.zeros([BLOCK_E], tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot)
        weight = tl.load(weight_ptr + token * SLOTS + slot)
        y_E = tl.load(y_ptr + row * SIZE + column_E, mask=inside_E, other=0.0).to(tl.float32)
        sum_E += y_E * weight
    if HAS_SHARED:
        sum_E += tl.load(shared_ptr + token * SIZE + column_E, mask=inside_E, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + column_E, sum_E.to(out_ptr.dtype.element_ty), mask=inside_E)


def combine_experts_triton(y_PE: Tensor, weight_TS: Tensor, row_TS: Tensor, shared_TE: Tensor | None) -> Tensor:
    """The launcher. All contiguous."""
    (tokens, slots), size = row_TS.shape, y_PE.shape[1]
    assert y_PE.is_contiguous() and weight_TS.is_contiguous() and row_TS.is_contiguous(), "combine_experts: strides"
    assert shared_TE is None or shared_TE.is_contiguous(), "combine_experts: strides of the shared expert's output"
    out_TE = torch.empty(tokens, size, dtype=y_PE.dtype, device=y_PE.device)
    options = {"enable_fp_fusion": False} if y_PE.is_cuda else {}
    if tokens:
        _combine_experts_kernel[(tokens, triton.cdiv(size, BLOCK_E))](
            y_PE, weight_TS, row_TS, shared_TE, out_TE,
            SIZE=size, SLOTS=slots, HAS_SHARED=shared_TE is not None, BLOCK_E=BLOCK_E, **options,
        )  # fmt: skip
    return out_TE


def combine_experts_reference(y_PE: Tensor, weight_TS: Tensor, row_TS: Tensor, shared_TE: Tensor | None) -> Tensor:
    """In plain torch: the same bits."""
    sum_TE = torch.zeros(row_TS.shape[0], y_PE.shape[1], dtype=torch.float32, device=y_PE.device)
    for row_T, weight_T in zip(row_TS.t(), weight_TS.t(), strict=True):
        sum_TE += y_PE[row_T].float() * weight_T[:, None]
    if shared_TE is not None:
        sum_TE += shared_TE
    return sum_TE.to(y_PE.dtype)


def combine_experts(y_PE: Tensor, weight_TS: Tensor, row_TS: Tensor, shared_TE: Tensor | None) -> Tensor:
    """out [T, E] in y's dtype. weight float32 and row int64 [T, S]; shared [T, E] or None. No gradient."""
    combine = combine_experts_triton if y_PE.is_cuda else combine_experts_reference
    return combine(y_PE, weight_TS, row_TS, shared_TE)
