"""Sum the words of each row, each mixed with its place: what a digest of weights is made of.

    factor[w]     = ((w + 1) * -0x61C8864680B583EB) | 1     int64, wraps around
    product[r, w] = words[r, w] * factor[w]                 int64, wraps around
    term[r, w]    = product ^ its upper half                no two words have the same term at one place
    sum[r]        = sum over w of term                      int64, wraps around, so its order does not matter

Two words that changed places show, because their factors differ. An odd factor leaves a word's top bit where it is, so
two changed signs would cancel in a sum of products: the upper half is added to the lower one by xor. torch writes the
products and reads them again, several passes over the memory; this kernel reads each word once. A long row is summed by
several programs, which add their parts atomically: integers that wrap around have the same sum in any order. An element
costs 8 bytes read.

Layout: words [R, W] int64, contiguous; sums [R] int64.

R rows, W words of a row, C words of a chunk, S of a span.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRIDE = -0x61C8864680B583EB
ROWS, CHUNK, SPAN = 4, 512, 8192  # rows of a program, words of a row in flight (16 KB), words of a row in all
WARPS = 4
PART = 1 << 23  # words whose products plain torch has in memory at once


@triton.jit
def _sum_words_kernel(
    word_ptr, sum_ptr, R, W, STRIDE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * SPAN
    total_RC = tl.zeros((ROWS, CHUNK), tl.int64)
    for begin in range(first, tl.minimum(first + SPAN, W), CHUNK):
        column_C = begin + tl.arange(0, CHUNK)
        inside_RC = (row_R < R)[:, None] & (column_C < W)[None, :]
        word_RC = tl.load(word_ptr + row_R[:, None] * W + column_C[None, :], mask=inside_RC, other=0)
        factor_C = ((column_C.to(tl.int64) + 1) * STRIDE) | 1
        product_RC = word_RC * factor_C[None, :]
        total_RC += product_RC ^ ((product_RC >> 32) & 0xFFFFFFFF)
    tl.atomic_add(sum_ptr + row_R, tl.sum(total_RC, axis=1), mask=row_R < R)


def sum_words_triton(words_RW: Tensor, sum_R: Tensor) -> Tensor:
    """The Triton launcher. `sum_R` is 0."""
    rows, words = words_RW.shape
    options = {"enable_fp_fusion": False} if words_RW.is_cuda else {}
    _sum_words_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(words, SPAN))](
        words_RW, sum_R, rows, words, STRIDE=STRIDE, ROWS=ROWS, CHUNK=CHUNK, SPAN=SPAN, num_warps=WARPS, **options
    )
    return sum_R


def mixed_with_places(words_W: Tensor) -> Tensor:
    """The terms of the sum, [..., W] int64."""
    factor_W = (torch.arange(1, words_W.shape[-1] + 1, device=words_W.device) * STRIDE) | 1
    products_W = words_W * factor_W
    return products_W ^ ((products_W >> 32) & 0xFFFFFFFF)


def sum_words_reference(words_RW: Tensor, sum_R: Tensor) -> Tensor:
    """The same in plain torch, in parts of rows that bound the memory of the products."""
    step = max(1, PART // max(1, words_RW.shape[1]))
    for part_PW, sum_P in zip(words_RW.split(step), sum_R.split(step), strict=True):
        sum_P.copy_(mixed_with_places(part_PW).sum(dim=1))
    return sum_R


@torch.no_grad()
def sum_words(words_RW: Tensor) -> Tensor:
    """[R] int64 of words [R, W]: int64, or uint8 where a row's bytes are no multiple of eight (plain torch then)."""
    assert words_RW.dim() == 2, f"expected words [R, W], got {list(words_RW.shape)}"
    sum_R = torch.zeros(len(words_RW), dtype=torch.int64, device=words_RW.device)
    fast = words_RW.is_cuda and words_RW.dtype == torch.int64 and words_RW.is_contiguous() and words_RW.numel() > 0
    return (sum_words_triton if fast else sum_words_reference)(words_RW, sum_R)
