"""The gated delta rule of a decode forward: one row of each sequence, or a few if it has drafts.

A program has one value head of one sequence, and 64 columns of V. It reads the state's high plane and the open rows
once for each row, and writes the row's k, d and decay. Only the first row of a chunk reads and writes the whole state:
then the chunk before enters it. Nothing is read on the host and the grid is fixed, so a graph may contain it.

The row is one of 16 columns of each product. Its bits are those of `delta_rule_rows`: a column of a product does not
depend on the others, rows behind the current one are zeros, and zeros change no accumulator.

J rows of a chunk, R rows of a block, K size of a key, S columns of V, C columns of a product: k's or d's row is column
0, q's is column 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.delta_rule.chunk_tiles import (
    BLOCKS,
    ROWS,
    SUB,
    block_of_columns,
    column,
    fold,
    high_plane,
    joined_planes,
    key_block,
    load_keys,
    low_plane,
    open_rows,
    rows_of,
)
from octetrl.kernels.delta_rule.state import DeltaState, SlotRows
from octetrl.shapes.delta_rule import SLICE, DeltaShape


@triton.jit
def _as_column(x, COLUMNS: tl.constexpr):
    """A vector as column 0 of a tile of zeros."""
    return tl.where(tl.arange(0, COLUMNS)[None, :] == 0, x[:, None], 0.0)


@triton.jit
def _enter_chunk(
    high_ptr, low_ptr, state_SK, inside_SK, k_JK, d_SJ, gamma_J, chunk,
):  # fmt: skip
    """Let a full chunk enter the state."""
    has_state_SK = inside_SK & (chunk > 0)
    high_SK = tl.load(high_ptr + state_SK, mask=has_state_SK, other=0.0)
    s_SK = joined_planes(high_SK, tl.load(low_ptr + state_SK, mask=has_state_SK, other=0))
    s_SK = fold(s_SK, d_SJ, k_JK, gamma_J)
    tl.store(high_ptr + state_SK, high_plane(s_SK), mask=inside_SK)
    tl.store(low_ptr + state_SK, low_plane(s_SK), mask=inside_SK)


@triton.jit
def _row(high_SK, kq_KC, k_JK, d_SJ, v_S, beta, gamma, gamma_J, row, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """d and o [S] of the chunk's row `row`; later rows of d_SJ are zero."""
    row_J = tl.arange(0, ROWS)
    pairs_JC = tl.dot(k_JK, kq_KC)
    decay_J = tl.exp(tl.minimum(gamma - gamma_J, 0.0))
    a_J = tl.where(row_J < row, (beta * decay_J) * column(pairs_JC, 0, SUB), 0.0)
    p_J = tl.where(row_J <= row, decay_J * column(pairs_JC, 1, SUB), 0.0)
    sums_SC = tl.dot(high_SK, kq_KC)
    weight = tl.exp(gamma)
    x_S = beta * (v_S - weight * column(sums_SC, 0, SUB))
    block = row // SUB
    earlier_J = tl.where(row_J < block * SUB, -a_J, 0.0)
    x_SC = tl.dot(d_SJ, _as_column(earlier_J, SUB).to(DTYPE), _as_column(x_S, SUB))
    x_S = column(x_SC, 0, SUB)
    own_BR = tl.where(tl.arange(0, BLOCKS)[:, None] == block, tl.reshape(a_J, [BLOCKS, SUB]), 0.0)
    own_SR = block_of_columns(d_SJ.to(tl.float32), block, WIDTH) * tl.sum(own_BR, 0)[None, :]
    for before in tl.static_range(SUB - 1):
        x_S = x_S - column(own_SR, before, SUB)
    d_S = x_S.to(DTYPE)
    d_SJ = tl.where(row_J[None, :] == row, d_S[:, None], d_SJ)
    o_SC = tl.dot(d_SJ, _as_column(p_J, SUB).to(DTYPE), _as_column(weight * column(sums_SC, 1, SUB), SUB))
    return d_S, column(o_SC, 0, SUB)


@triton.jit
def _delta_rule_decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, out_ptr, cu_seqlens_ptr, slot_ptr, first_ptr,
    high_ptr, low_ptr, open_k_ptr, open_d_ptr, open_gamma_ptr, chunk_ptr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    slice_of = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    start, count = rows_of(sequence, cu_seqlens_ptr)
    slot, chunk, opened = open_rows(
        sequence, slot_ptr, first_ptr, chunk_ptr, head * SLICES + slice_of, HEADS * SLICES, True
    )  # fmt: skip
    column_S = slice_of * WIDTH + tl.arange(0, WIDTH)
    inside_S = column_S < VALUE_SIZE
    value_S = (start.to(tl.int64) * HEADS + head) * VALUE_SIZE + column_S
    if slot < 0:
        for _ in range(count):
            tl.store(out_ptr + value_S, tl.zeros([WIDTH], out_ptr.dtype.element_ty), mask=inside_S)
            value_S += HEADS * VALUE_SIZE
    elif count > 0:
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        d_K = tl.arange(0, BLOCK_K)
        row_J = tl.arange(0, ROWS)
        column_C = tl.arange(0, SUB)
        inside_SK = inside_S[:, None] & (d_K < KEY_SIZE)[None, :]
        of_head = slot * HEADS + head
        state_SK = (of_head * VALUE_SIZE + column_S[:, None]) * KEY_SIZE + d_K[None, :]
        open_k = open_k_ptr + (slot * KEY_HEADS + key_head) * (2 * ROWS * KEY_SIZE)
        open_d = open_d_ptr + of_head * (ROWS * VALUE_SIZE)
        open_gamma = open_gamma_ptr + of_head * (2 * ROWS)
        open_d_SJ = open_d + row_J[None, :] * VALUE_SIZE + column_S[:, None]
        poison = tl.where(opened < 0, float("nan"), 0.0)
        if opened == ROWS:
            k_JK = load_keys(
                k_ptr, open_k, row_J, row_J - ROWS, row_J < 0, d_K, key_head, chunk % 2, KEY_HEADS, KEY_SIZE, True
            )
            d_SJ = tl.load(open_d_SJ, mask=inside_S[:, None], other=0.0)
            gamma_J = tl.load(open_gamma + chunk % 2 * ROWS + row_J)
            _enter_chunk(high_ptr, low_ptr, state_SK, inside_SK, k_JK, d_SJ, gamma_J, chunk)
            chunk += 1
            opened = opened * 0
            tl.debug_barrier()
        opened = tl.maximum(opened, 0)
        tl.store(chunk_ptr + of_head * SLICES + slice_of, chunk.to(tl.int32))
        high_SK = tl.load(high_ptr + state_SK, mask=inside_SK & (chunk > 0), other=0.0)
        parity = chunk % 2
        gamma_ptr = open_gamma + parity * ROWS
        gamma = poison + tl.load(gamma_ptr + opened - 1, mask=opened > 0, other=0.0)
        for offset in range(count):
            row = opened + offset
            token = (start + offset).to(tl.int64)
            offset_J = row_J - opened
            is_new_J = (offset_J >= 0) & (offset_J <= offset)
            k_JK = load_keys(
                k_ptr, open_k, start + offset_J, offset_J, is_new_J, d_K, key_head, parity, KEY_HEADS, KEY_SIZE, True
            )
            key_KC = ((token * KEY_HEADS + key_head) * KEY_SIZE + d_K)[:, None] + column_C[None, :] * 0
            is_key_KC = (d_K < KEY_SIZE)[:, None] & (column_C == 0)[None, :]
            is_query_KC = (d_K < KEY_SIZE)[:, None] & (column_C == 1)[None, :]
            kq_KC = tl.load(k_ptr + key_KC, mask=is_key_KC, other=0.0)
            kq_KC = tl.where(is_query_KC, tl.load(q_ptr + key_KC, mask=is_query_KC, other=0.0), kq_KC)
            d_SJ = tl.load(open_d_SJ, mask=inside_S[:, None] & (row_J < row)[None, :], other=0.0)
            gamma += tl.load(g_ptr + token * HEADS + head)
            gamma_J = tl.load(gamma_ptr + row_J, mask=row_J < row, other=0.0)
            gamma_J = tl.where(row_J == row, gamma, gamma_J)
            beta = tl.load(beta_ptr + token * HEADS + head)
            v_S = tl.load(v_ptr + value_S, mask=inside_S, other=0.0).to(tl.float32)
            d_S, o_S = _row(high_SK, kq_KC, k_JK, d_SJ, v_S, beta, gamma, gamma_J, row, WIDTH, dtype)
            tl.store(out_ptr + value_S, o_S.to(dtype), mask=inside_S)
            tl.debug_barrier()  # every thread has read the rows that these overwrite
            tl.store(open_d + row * VALUE_SIZE + column_S, d_S, mask=inside_S)
            tl.store(gamma_ptr + row, gamma)
            if (slice_of == 0) & (head % (HEADS // KEY_HEADS) == 0):
                key_K = (token * KEY_HEADS + key_head) * KEY_SIZE + d_K
                to_K = open_k + (parity * ROWS + row) * KEY_SIZE + d_K
                tl.store(to_K, tl.load(k_ptr + key_K, mask=d_K < KEY_SIZE, other=0.0), mask=d_K < KEY_SIZE)
            tl.debug_barrier()  # the next row reads them
            value_S += HEADS * VALUE_SIZE


def delta_rule_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: SlotRows, state: DeltaState, shape: DeltaShape
) -> Tensor:
    """o [T, H, V]; idle rows are zero. Inputs are contiguous."""
    out_THV = torch.empty_like(v)
    _delta_rule_decode_kernel[(shape.slices, shape.value_heads, len(rows.slot_B))](
        q, k, v, g, beta, out_THV, rows.cu_seqlens_B1, rows.slot_B, rows.first_position_B, *state[:6],
        HEADS=shape.value_heads, KEY_HEADS=shape.key_heads, KEY_SIZE=shape.key_size, VALUE_SIZE=shape.value_size,
        BLOCK_K=key_block(shape.key_size), WIDTH=SLICE, SLICES=shape.slices, num_warps=4,
        **({"enable_fp_fusion": False} if q.is_cuda else {}),
    )  # fmt: skip
    return out_THV
