"""The second product of LoRA, added to the projection's columns in place: y = round(y + round(s * round(t B^T))).

Each rounding is to y's dtype, as in three separate ops of that dtype (layers/lora.py). The rank R is the depth of the
product. It is added in ascending tiles into one float32 accumulator. The tiles are the same for any number of rows, so
a row's bits do not depend on the batch. y may be a slice of columns of a wider product, and t of a wider t.

Bytes: y read and written, 4 M N; t and B read once. The kernel runs between the GEMM that wrote y and the op that reads
it.

No gradient. M rows, N columns, R rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_M, TILE_N, LARGEST_TILE_R = 64, 64, 64


@triton.jit(do_not_specialize=["num_rows", "scale"])
def _lora_up_kernel(
    y_ptr,
    t_ptr,
    b_ptr,
    num_rows,
    num_columns,
    y_stride,
    t_stride,
    scale,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row_M = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, RANK, BLOCK_R):
        rank_R = start + tl.arange(0, BLOCK_R)
        inside_R = rank_R < RANK
        t_mask = (row_M < num_rows)[:, None] & inside_R[None, :]
        t_MR = tl.load(t_ptr + row_M[:, None] * t_stride + rank_R[None, :], mask=t_mask, other=0.0)
        b_mask = inside_R[:, None] & (column_N < num_columns)[None, :]
        b_RN = tl.load(b_ptr + column_N[None, :] * RANK + rank_R[:, None], mask=b_mask, other=0.0)
        acc_MN = tl.dot(t_MR, b_RN, acc_MN)
    u_MN = acc_MN.to(y_ptr.dtype.element_ty).to(tl.float32)
    branch_MN = (u_MN * scale).to(y_ptr.dtype.element_ty).to(tl.float32)
    inside_MN = (row_M < num_rows)[:, None] & (column_N < num_columns)[None, :]
    y_ptr_MN = y_ptr + row_M[:, None] * y_stride + column_N[None, :]
    y_MN = tl.load(y_ptr_MN, mask=inside_MN, other=0.0).to(tl.float32)
    tl.store(y_ptr_MN, (y_MN + branch_MN).to(y_ptr.dtype.element_ty), mask=inside_MN)


def lora_up_triton(y_MN: Tensor, t_MR: Tensor, b_NR: Tensor, scale: float) -> None:
    """The kernel's launcher."""
    (num_rows, num_columns), rank = y_MN.shape, b_NR.shape[1]
    if num_rows == 0:
        return
    tile_r = min(max(16, triton.next_power_of_2(rank)), LARGEST_TILE_R)
    grid = (triton.cdiv(num_rows, TILE_M), triton.cdiv(num_columns, TILE_N))
    _lora_up_kernel[grid](
        y_MN, t_MR, b_NR, num_rows, num_columns, y_MN.stride(0), t_MR.stride(0), scale,
        RANK=rank, BLOCK_M=TILE_M, BLOCK_N=TILE_N, BLOCK_R=tile_r, num_warps=4,
        **({"enable_fp_fusion": False} if y_MN.is_cuda else {}),
    )  # fmt: skip


def lora_up_reference(y_MN: Tensor, t_MR: Tensor, b_NR: Tensor, scale: float) -> None:
    """The same in plain torch: sums in float64, rounded to float32 and then at the kernel's points."""
    u_MN = (t_MR.double() @ b_NR.double().t()).float().to(y_MN.dtype)
    y_MN.add_(u_MN * scale)


def lora_up(y_MN: Tensor, t_MR: Tensor, b_NR: Tensor, scale: float) -> None:
    """Add the LoRA branch to y, in place. One dtype; last axes contiguous. float32 on a GPU promises no bits."""
    assert t_MR.shape == (y_MN.shape[0], b_NR.shape[1]) and b_NR.shape[0] == y_MN.shape[1], (
        f"lora_up: y {tuple(y_MN.shape)}, t {tuple(t_MR.shape)}, b {tuple(b_NR.shape)}"
    )
    assert y_MN.dtype == t_MR.dtype == b_NR.dtype, f"lora_up: {y_MN.dtype}, {t_MR.dtype}, {b_NR.dtype}"
    assert y_MN.stride(1) == t_MR.stride(1) == 1 and b_NR.is_contiguous(), "lora_up: last axes must be contiguous"
    if not y_MN.is_cuda:
        lora_up_reference(y_MN, t_MR, b_NR, scale)
    elif y_MN.dtype == torch.bfloat16:
        lora_up_triton(y_MN, t_MR, b_NR, scale)
    else:
        y_MN.add_(t_MR @ b_NR.t() * scale)
