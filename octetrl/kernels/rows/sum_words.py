"""Sum the words of each row of many tensors, each word mixed with its place: what a digest of weights is made of.

    first[w]  = (w + 1) * STRIDE | 1                                    int64, wraps around, as all that follows
    second[w] = (first[w] ^ its upper half) * STRIDE | 1
    term      = (word * first ^ its upper half) * second                no two words have the same term at one place
    sum[r]    = sum over w of the row's terms                           its order does not matter

Two words that changed places show, because their factors differ. An odd factor leaves a word's top bit where it is, so
changed signs would cancel in a sum of products. The xor brings that bit to the lower half, and the second factor makes
what it adds depend on the place. `second` must not be linear in the place: then the changes of four words often cancel
(w1 + w4 = w2 + w3). A word has eight bytes. If a row's bytes are no multiple of eight, each byte is a word.

torch writes the products and reads them again, several passes over the memory; this kernel reads each word once. One
launch takes all tensors (kernels/table.py). A long row is summed by several programs, which add their parts atomically:
integers that wrap around have the same sum in any order.

Layout: tensors of any dtype. Rows are along the first dimension; a tensor of one dimension is one row. sums [N] int64,
in the order of tensors and rows.

R rows, W words of a row, C words of a chunk, N rows of all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.table import ALIGNED, parts_of, table_of

STRIDE = -0x61C8864680B583EB
ROWS, CHUNK, SPAN = 4, 512, 8192  # rows of a program, words of a row in flight (16 KB), words of a row in all
WARPS = 4
PART = 1 << 23  # words whose products plain torch has in memory at once
BYTES, WORDS, PAIRS = 0, 1, 2  # what a program loads: PAIRS are two words, 16 bytes, at such an address


@triton.jit
def _add_sums(
    word_ptr, sum_ptr, row, first, R, W, STRIDE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    row_R = row.to(tl.int64) + tl.arange(0, ROWS)
    total_RC = tl.zeros((ROWS, CHUNK), tl.int64)
    for begin in range(first, tl.minimum(first + SPAN, W), CHUNK):
        column_C = begin + tl.arange(0, CHUNK)
        inside_RC = (row_R < R)[:, None] & (column_C < W)[None, :]
        word_RC = tl.load(word_ptr + row_R[:, None] * W + column_C[None, :], mask=inside_RC, other=0).to(tl.int64)
        first_C = ((column_C.to(tl.int64) + 1) * STRIDE) | 1
        second_C = ((first_C ^ ((first_C >> 32) & 0xFFFFFFFF)) * STRIDE) | 1
        product_RC = word_RC * first_C[None, :]
        total_RC += (product_RC ^ ((product_RC >> 32) & 0xFFFFFFFF)) * second_C[None, :]
    tl.atomic_add(sum_ptr + row_R, tl.sum(total_RC, axis=1), mask=row_R < R, sem="relaxed")


@triton.jit
def _sum_words_kernel(
    entry_ptr, table_ptr, sum_ptr, COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr,
    WORDS: tl.constexpr, PAIRS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    table_ptr += tl.load(entry_ptr + tl.program_id(0)) * COLUMNS
    address, kind = tl.load(table_ptr), tl.load(table_ptr + 1)
    R, W = tl.load(table_ptr + 2).to(tl.int32), tl.load(table_ptr + 3).to(tl.int32)
    sum_ptr += tl.load(table_ptr + 4)
    place = tl.program_id(0) - tl.load(table_ptr + 5).to(tl.int32)
    spans = tl.cdiv(W, SPAN)
    row, first = place // spans * ROWS, place % spans * SPAN
    if kind == PAIRS:
        word_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), ALIGNED)
        _add_sums(word_ptr, sum_ptr, row, first, R, W // 2 * 2, STRIDE, ROWS, CHUNK, SPAN)
    elif kind == WORDS:
        _add_sums(address.to(tl.pointer_type(tl.int64)), sum_ptr, row, first, R, W, STRIDE, ROWS, CHUNK, SPAN)
    else:
        _add_sums(address.to(tl.pointer_type(tl.uint8)), sum_ptr, row, first, R, W, STRIDE, ROWS, CHUNK, SPAN)


def sum_words_triton(tensors: Sequence[Tensor], sum_N: Tensor) -> Tensor:
    """The Triton launcher. The tensors are contiguous. `sum_N` is 0."""
    entries, programs, first = [], [], 0
    for tensor in tensors:
        rows, row_bytes = _rows_and_bytes(tensor)
        if row_bytes and rows:
            address = tensor.data_ptr()
            kind = BYTES if row_bytes % 8 else WORDS if (row_bytes | address) % ALIGNED else PAIRS
            assert kind == BYTES or address % 8 == 0, "rows of words begin at a multiple of eight bytes"
            words = row_bytes if kind == BYTES else row_bytes // 8
            entries.append((address, kind, rows, words, first))
            programs.append(parts_of(rows, ROWS) * parts_of(words, SPAN))
        first += rows
    if not entries:
        return sum_N
    table = table_of(entries, programs, sum_N.device)
    options = {"enable_fp_fusion": False} if sum_N.is_cuda else {}
    _sum_words_kernel[(table.programs,)](
        *table, sum_N, COLUMNS=table.columns, STRIDE=STRIDE, ROWS=ROWS, CHUNK=CHUNK, SPAN=SPAN, WORDS=WORDS,
        PAIRS=PAIRS, ALIGNED=ALIGNED, num_warps=WARPS, **options,
    )  # fmt: skip
    return sum_N


def mixed_with_places(words_W: Tensor) -> Tensor:
    """The terms of the sum, [..., W] int64."""
    first_W = (torch.arange(1, words_W.shape[-1] + 1, device=words_W.device) * STRIDE) | 1
    return _with_upper_half(words_W * first_W) * ((_with_upper_half(first_W) * STRIDE) | 1)


def _with_upper_half(words: Tensor) -> Tensor:
    return words ^ ((words >> 32) & 0xFFFFFFFF)


def sum_words_reference(tensors: Sequence[Tensor], sum_N: Tensor) -> Tensor:
    """The same in plain torch, in parts of rows that bound the memory of the products."""
    counts = [_rows_and_bytes(tensor)[0] for tensor in tensors]
    for tensor, sum_R in zip(tensors, sum_N.split(counts), strict=True):
        if not tensor.numel():
            continue
        words_RW = tensor.reshape(len(sum_R), -1).view(torch.uint8)
        if words_RW.shape[1] % 8 == 0:
            words_RW = words_RW.view(torch.int64)
        step = max(1, PART // max(1, words_RW.shape[1]))
        for part_PW, sum_P in zip(words_RW.split(step), sum_R.split(step), strict=True):
            sum_P.copy_(mixed_with_places(part_PW).sum(dim=1))
    return sum_N


def _rows_and_bytes(tensor: Tensor) -> tuple[int, int]:
    """The tensor's rows, and the bytes of one."""
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    return rows, tensor.nbytes // max(rows, 1)


@torch.no_grad()
def sum_words(tensors: Sequence[Tensor]) -> Tensor:
    """int64 sums of the rows of all tensors, in their order. They are on one device."""
    held = [tensor.contiguous() for tensor in tensors]
    device = held[0].device if held else torch.device("cpu")
    sum_N = torch.zeros(sum(_rows_and_bytes(tensor)[0] for tensor in held), dtype=torch.int64, device=device)
    return (sum_words_triton if sum_N.is_cuda else sum_words_reference)(held, sum_N)
