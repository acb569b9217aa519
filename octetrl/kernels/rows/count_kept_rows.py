"""Add the counters of some rows of the last forward to a total, and clear those of all its rows.

    total[i] += sum of counters[r, i] over the rows r that are kept;  counters[r] = 0 for all rows of the forward

A forward with drafts counts clamped values row by row. Which rows became tokens is known only when its results have
been read, so the next forward with drafts begins with this sum. Integers have no order of sums.

R rows, I counters of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _count_kept_rows_kernel(counter_ptr, kept_ptr, total_ptr, width, R, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr):
    i_I = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    num_rows = tl.load(kept_ptr + R).to(tl.int32)
    sum_I = tl.zeros([BLOCK_I], dtype=tl.int64)
    for start in range(0, num_rows, BLOCK_R):
        r_R = start + tl.arange(0, BLOCK_R)
        kept_R = tl.load(kept_ptr + r_R, mask=r_R < num_rows, other=0)
        inside_RI = (r_R < num_rows)[:, None] & (i_I < width)[None, :]
        ptr_RI = counter_ptr + r_R[:, None] * width + i_I[None, :]
        sum_I += tl.sum(tl.load(ptr_RI, mask=inside_RI, other=0) * kept_R[:, None], 0)
        tl.store(ptr_RI, tl.zeros([BLOCK_R, BLOCK_I], dtype=tl.int64), mask=inside_RI)
    tl.store(total_ptr + i_I, tl.load(total_ptr + i_I, mask=i_I < width, other=0) + sum_I, mask=i_I < width)


def count_kept_rows_triton(counters_RI: Tensor, kept_R1: Tensor, total_I: Tensor) -> None:
    """The kernel's launcher. All contiguous."""
    rows, counters = counters_RI.shape
    _count_kept_rows_kernel[(triton.cdiv(counters, 64),)](
        counters_RI, kept_R1, total_I, counters, rows, BLOCK_R=16, BLOCK_I=64,
        **({"enable_fp_fusion": False} if counters_RI.is_cuda else {}),
    )  # fmt: skip


def count_kept_rows_reference(counters_RI: Tensor, kept_R1: Tensor, total_I: Tensor) -> None:
    """The same in plain torch."""
    num_rows = int(kept_R1[-1])
    total_I += (counters_RI[:num_rows] * kept_R1[:num_rows, None]).sum(0)
    counters_RI[:num_rows] = 0


@torch.no_grad()
def count_kept_rows(counters_RI: Tensor, kept_R1: Tensor, total_I: Tensor) -> None:
    """All int64. kept_R1: 1 for each row that is kept, else 0; its last entry is the number of rows of the forward."""
    count = count_kept_rows_triton if counters_RI.is_cuda else count_kept_rows_reference
    count(counters_RI, kept_R1, total_I)
