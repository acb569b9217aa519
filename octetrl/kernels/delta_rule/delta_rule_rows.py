"""The gated delta rule along each sequence: its chunks in order, from the state to the outputs and the next state.

A program has one value head of one sequence, and 64 columns of V; the state stays in its registers. Of each chunk it
reads k, q, v and what `delta_rule_chunks` has computed. Within a block, d follows row by row in each thread; everything
else is products on tensor cores. The order is that of delta_rule_reference.py.

J rows of a chunk, R rows of a block, K size of a key, S columns of V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.delta_rule.chunk_tiles import (
    BLOCKS,
    ROWS,
    SUB,
    Chunks,
    block_of_columns,
    chunk_numbers,
    column,
    fold,
    high_plane,
    joined_planes,
    key_block,
    load_keys,
    low_plane,
    open_rows,
    rows_of,
    with_block,
)
from octetrl.kernels.delta_rule.state import DeltaState, SlotRows
from octetrl.shapes.delta_rule import SLICE, DeltaShape


class KeptChunks(NamedTuple):
    """What the backward reads of the forward."""

    states: Tensor  # [N, H, V, K]: S at each chunk's start, rounded
    d: Tensor  # [T, H, V]


@triton.jit
def _own_block(x_SR, opened_SR, own_ptr, num_open, WIDTH: tl.constexpr, DTYPE: tl.constexpr, SLOTS: tl.constexpr):
    """d of a block, float32 values that are rounded; rows before `num_open` are those of `opened_SR`."""
    d_SR = tl.zeros([WIDTH, SUB], tl.float32)
    row_R = tl.arange(0, SUB)
    for row in tl.static_range(SUB):
        d_S = column(x_SR, row, SUB).to(DTYPE).to(tl.float32)
        if SLOTS:
            d_S = tl.where(row < num_open, column(opened_SR, row, SUB), d_S)
        d_SR = tl.where(row_R[None, :] == row, d_S[:, None], d_SR)
        a_R = tl.load(own_ptr + row_R * SUB + row, mask=row_R > row, other=0.0)
        x_SR = x_SR - a_R[None, :] * d_S[:, None]
    return d_SR


@triton.jit
def _chunk_of_d(
    x_SJ, opened_SJ, earlier_ptr, own_ptr, num_open,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """d of a chunk [S, J], in the model's dtype."""
    d_SJ = tl.zeros([WIDTH, ROWS], DTYPE)
    row_R = tl.arange(0, SUB)
    row_J = tl.arange(0, ROWS)
    for block in range(BLOCKS):
        a_JR = tl.load(earlier_ptr + (row_R + block * SUB)[None, :] * ROWS + row_J[:, None])
        x_SR = tl.dot(d_SJ, a_JR, block_of_columns(x_SJ, block, WIDTH))
        opened_SR = block_of_columns(opened_SJ, block, WIDTH) if SLOTS else x_SR
        d_SR = _own_block(
            x_SR, opened_SR, own_ptr + block * (SUB * SUB), num_open - block * SUB, WIDTH, DTYPE, SLOTS
        )  # fmt: skip
        d_SJ = with_block(d_SJ, d_SR.to(DTYPE), block, WIDTH)
    return d_SJ


@triton.jit
def _delta_rule_rows_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, out_ptr, cu_seqlens_ptr, gamma_ptr, earlier_ptr, own_ptr, p_ptr,
    slot_ptr, first_ptr, high_ptr, low_ptr, open_k_ptr, open_d_ptr, open_gamma_ptr, chunk_ptr, states_ptr, d_ptr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr, SLOTS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    slice_of = tl.program_id(0)
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    start, count = rows_of(sequence, cu_seqlens_ptr)
    slot, chunk, opened = open_rows(
        sequence, slot_ptr, first_ptr, chunk_ptr, head * SLICES + slice_of, HEADS * SLICES, SLOTS
    )  # fmt: skip
    opened = tl.maximum(opened, 0)
    if (slot >= 0) & (count > 0):
        column_S = slice_of * WIDTH + tl.arange(0, WIDTH)
        d_K = tl.arange(0, BLOCK_K)
        row_J = tl.arange(0, ROWS)
        inside_SK = (column_S < VALUE_SIZE)[:, None] & (d_K < KEY_SIZE)[None, :]
        of_state_SK = column_S[:, None] * KEY_SIZE + d_K[None, :]
        of_head = slot * HEADS + head
        state_SK = of_head * (VALUE_SIZE * KEY_SIZE) + of_state_SK
        open_k = k_ptr
        open_d_SJ = of_head * (ROWS * VALUE_SIZE) + row_J[None, :] * VALUE_SIZE + column_S[:, None]
        s_SK = tl.zeros([WIDTH, BLOCK_K], tl.float32)
        if SLOTS:
            open_k = open_k_ptr + (slot * KEY_HEADS + key_head) * (2 * ROWS * KEY_SIZE)
            high_SK = tl.load(high_ptr + state_SK, mask=inside_SK & (chunk > 0), other=0.0)
            s_SK = joined_planes(high_SK, tl.load(low_ptr + state_SK, mask=inside_SK & (chunk > 0), other=0))
        num_chunks = (opened + count + ROWS - 1) // ROWS
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        m = 0
        while m < num_chunks:  # for would carry the state in each layout that the loop uses
            at = (start // ROWS + 2 * sequence + m).to(tl.int64) * HEADS + head
            offset_J = m * ROWS + row_J - opened
            is_new_J = (offset_J >= 0) & (offset_J < count)
            token_J = start + offset_J
            k_JK = load_keys(
                k_ptr, open_k, token_J, offset_J, is_new_J, d_K, key_head, chunk % 2, KEY_HEADS, KEY_SIZE, SLOTS
            )
            inside_SJ = (column_S < VALUE_SIZE)[:, None] & is_new_J[None, :]
            value_SJ = (token_J * HEADS + head)[None, :] * VALUE_SIZE + column_S[:, None]
            v_SJ = tl.load(v_ptr + value_SJ, mask=inside_SJ, other=0.0).to(tl.float32)
            beta_J = tl.load(beta_ptr + token_J * HEADS + head, mask=is_new_J, other=0.0)
            gamma_J = tl.load(gamma_ptr + at * ROWS + row_J)
            weight_J = tl.exp(gamma_J)
            high_SK = high_plane(s_SK)
            if KEEP:
                tl.store(states_ptr + at * (VALUE_SIZE * KEY_SIZE) + of_state_SK, high_SK, mask=inside_SK)
            x_SJ = beta_J[None, :] * (v_SJ - weight_J[None, :] * tl.dot(high_SK, tl.trans(k_JK)))
            is_open_SJ = (column_S < VALUE_SIZE)[:, None] & (offset_J < 0)[None, :]
            opened_SJ = tl.load(open_d_ptr + open_d_SJ, mask=is_open_SJ, other=0.0).to(tl.float32) if SLOTS else x_SJ
            d_SJ = _chunk_of_d(
                x_SJ, opened_SJ, earlier_ptr + at * (ROWS * ROWS), own_ptr + at * (BLOCKS * SUB * SUB),
                opened - m * ROWS, WIDTH, dtype, SLOTS,
            )  # fmt: skip
            p_JJ = tl.load(p_ptr + at * (ROWS * ROWS) + row_J[None, :] * ROWS + row_J[:, None])
            q_JK = load_keys(q_ptr, q_ptr, token_J, offset_J, is_new_J, d_K, key_head, 0, KEY_HEADS, KEY_SIZE, False)
            qs_SJ = tl.dot(high_SK, tl.trans(q_JK))
            o_SJ = tl.dot(d_SJ, p_JJ, weight_J[None, :] * qs_SJ)
            tl.store(out_ptr + value_SJ, o_SJ.to(dtype), mask=inside_SJ)
            if KEEP:
                tl.store(d_ptr + value_SJ, d_SJ, mask=inside_SJ)
            if m < num_chunks - 1:
                k_JK = load_keys(
                    k_ptr, open_k, token_J, offset_J, is_new_J, d_K, key_head, chunk % 2, KEY_HEADS, KEY_SIZE, SLOTS
                )
                s_SK = fold(s_SK, d_SJ, k_JK, gamma_J)
            elif SLOTS:
                tl.store(open_d_ptr + open_d_SJ, d_SJ, mask=inside_SJ)
                kept_J = open_gamma_ptr + (of_head * 2 + (chunk + m) % 2) * ROWS + row_J
                tl.store(kept_J, gamma_J, mask=is_new_J & (slice_of == 0))
            m += 1
        if SLOTS:
            tl.store(high_ptr + state_SK, high_plane(s_SK), mask=inside_SK)
            tl.store(low_ptr + state_SK, low_plane(s_SK), mask=inside_SK)
            tl.store(chunk_ptr + of_head * SLICES + slice_of, (chunk + num_chunks - 1).to(tl.int32))


@triton.jit
def _store_keys_kernel(
    k_ptr, open_k_ptr, cu_seqlens_ptr, slot_ptr, first_ptr, chunk_ptr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):  # fmt: skip
    """k of the new rows of the last chunk, once no program reads open rows any more."""
    sequence = tl.program_id(0)
    key_head = tl.program_id(1)
    start, count = rows_of(sequence, cu_seqlens_ptr)
    slot = tl.load(slot_ptr + sequence)
    if (slot >= 0) & (count > 0):
        chunk = tl.load(chunk_ptr + slot * (HEADS * SLICES)).to(tl.int64)
        row_J = tl.arange(0, ROWS)
        d_K = tl.arange(0, BLOCK_K)
        offset_J = chunk * ROWS + row_J - tl.load(first_ptr + sequence)
        inside_JK = ((offset_J >= 0) & (offset_J < count))[:, None] & (d_K < KEY_SIZE)[None, :]
        from_J = ((start + offset_J) * KEY_HEADS + key_head) * KEY_SIZE
        to_J = ((slot * KEY_HEADS + key_head) * 2 + chunk % 2) * ROWS + row_J
        k_JK = tl.load(k_ptr + from_J[:, None] + d_K[None, :], mask=inside_JK, other=0.0)
        tl.store(open_k_ptr + to_J[:, None] * KEY_SIZE + d_K[None, :], k_JK, mask=inside_JK)


def delta_rule_rows(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, cu_seqlens_B1: Tensor, chunks: Chunks, shape: DeltaShape,
    rows: SlotRows | None = None, state: DeltaState | None = None, keep: bool = False,
) -> tuple[Tensor, KeptChunks | None]:  # fmt: skip
    """o [T, H, V], zero outside every sequence and in idle rows. Inputs are contiguous. `keep`: for the backward."""
    num_sequences = len(cu_seqlens_B1) - 1
    out_THV = torch.zeros_like(v)
    kept = None
    if keep:
        numbers = chunk_numbers(len(q), num_sequences)
        sizes = (numbers, shape.value_heads, shape.value_size, shape.key_size)
        kept = KeptChunks(torch.empty(sizes, dtype=torch.bfloat16, device=v.device), torch.zeros_like(v))
    sizes_of = {
        "HEADS": shape.value_heads, "KEY_HEADS": shape.key_heads, "KEY_SIZE": shape.key_size,
        "BLOCK_K": key_block(shape.key_size), "SLICES": shape.slices,
    }  # fmt: skip
    slots: tuple[Tensor | None, ...] = (None,) * 8
    if rows is not None and state is not None:
        slots = (rows.slot_B, rows.first_position_B, *state[:6])
    options = {"enable_fp_fusion": False} if q.is_cuda else {}
    _delta_rule_rows_kernel[(shape.slices, num_sequences, shape.value_heads)](
        q, k, v, beta, out_THV, cu_seqlens_B1, *chunks, *slots, *(kept or (None, None)),
        **sizes_of, VALUE_SIZE=shape.value_size, WIDTH=SLICE, SLOTS=rows is not None, KEEP=keep, num_warps=4,
        **options,
    )  # fmt: skip
    if rows is not None and state is not None:
        _store_keys_kernel[(num_sequences, shape.key_heads)](
            k, state.open_k, cu_seqlens_B1, rows.slot_B, rows.first_position_B, state.chunk, **sizes_of, **options
        )
    return out_THV, kept
