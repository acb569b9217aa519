"""Products of a chunk's keys and queries: what the gated delta rule needs of a chunk besides the state.

    Gamma_i = Gamma_{i-1} + g_i           one after another
    earlier = round(-a_ij), own = a_ij    a_ij = (beta_i exp(Gamma_i - Gamma_j)) (k_i . k_j), by block
    p_ij    = round(exp(Gamma_i - Gamma_j) (q_i . k_j))

All chunks run in parallel, a program for each chunk and key head. `delta_rule_rows` then goes through each sequence's
chunks in order. No tile depends on the number of rows, so a chunk that is computed in pieces has the same bits.

N chunks, J rows of a chunk, G key heads, H value heads, K size of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.delta_rule.chunk_tiles import (
    BLOCKS,
    ROWS,
    SUB,
    Chunks,
    chunk_numbers,
    empty_chunks,
    key_block,
    load_keys,
    open_rows,
    rows_of,
    sequence_of,
)
from octetrl.kernels.delta_rule.state import DeltaState, SlotRows
from octetrl.shapes.delta_rule import DeltaShape


@triton.jit
def _sum_decays(
    g_ptr, open_gamma_ptr, open_at, gamma_ptr, start, count, offset, opened, poison, head,
    HEADS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Gamma of each row of a chunk, stored; rows behind the last one repeat it. `offset`: of the chunk's first row."""
    gamma = poison
    for row in tl.static_range(ROWS):
        at = offset + row
        g = tl.load(g_ptr + (start + at).to(tl.int64) * HEADS + head, mask=(at >= 0) & (at < count), other=0.0)
        gamma += g
        if SLOTS:
            kept = tl.load(open_gamma_ptr + open_at + row, mask=row < opened, other=0.0)
            gamma = tl.where(row < opened, kept, gamma)
        tl.store(gamma_ptr + row, gamma)


@triton.jit(do_not_specialize=["num_sequences"])
def _delta_rule_chunks_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, cu_seqlens_ptr, slot_ptr, first_ptr, open_k_ptr, open_gamma_ptr, chunk_ptr,
    gamma_ptr, earlier_ptr, own_ptr, p_ptr, num_sequences,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    key_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    sequence = sequence_of(number, cu_seqlens_ptr, num_sequences)
    start, count = rows_of(sequence, cu_seqlens_ptr)
    slot, chunk, opened = open_rows(
        sequence, slot_ptr, first_ptr, chunk_ptr, key_head * GROUP * SLICES, HEADS * SLICES, SLOTS
    )  # fmt: skip
    poison = tl.where(opened < 0, float("nan"), 0.0)
    opened = tl.maximum(opened, 0)
    m = number - (start // ROWS + 2 * sequence)
    row_J = tl.arange(0, ROWS)
    offset_J = m * ROWS + row_J - opened
    if (slot >= 0) & (count > 0) & (m * ROWS < opened + count):
        is_new_J = (offset_J >= 0) & (offset_J < count)
        token_J = start + offset_J
        d_K = tl.arange(0, BLOCK_K)
        open_ptr = k_ptr
        if SLOTS:
            open_ptr = open_k_ptr + (slot * KEY_HEADS + key_head) * (2 * ROWS * KEY_SIZE)
        k_JK = load_keys(
            k_ptr, open_ptr, token_J, offset_J, is_new_J, d_K, key_head, chunk % 2, KEY_HEADS, KEY_SIZE, SLOTS
        )
        q_JK = load_keys(q_ptr, q_ptr, token_J, offset_J, is_new_J, d_K, key_head, 0, KEY_HEADS, KEY_SIZE, False)
        kk_JJ = tl.dot(k_JK, tl.trans(k_JK))
        qk_JJ = tl.dot(q_JK, tl.trans(k_JK))
        column_1J = row_J[None, :]
        is_before_JJ = column_1J < row_J[:, None] // SUB * SUB
        is_own_JJ = column_1J // SUB == row_J[:, None] // SUB
        is_own_JJ = is_own_JJ & (column_1J < row_J[:, None])
        for member in tl.static_range(GROUP):
            head = key_head * GROUP + member
            at = number.to(tl.int64) * HEADS + head
            open_at = ((slot * HEADS + head) * 2 + chunk % 2) * ROWS
            _sum_decays(
                g_ptr, open_gamma_ptr, open_at, gamma_ptr + at * ROWS, start, count, m * ROWS - opened,
                tl.where(m == 0, opened, 0), poison, head, HEADS, SLOTS,
            )  # fmt: skip
            tl.debug_barrier()
            gamma_J = tl.load(gamma_ptr + at * ROWS + row_J)
            beta_J = tl.load(beta_ptr + token_J.to(tl.int64) * HEADS + head, mask=is_new_J, other=0.0)
            decay_JJ = tl.exp(tl.minimum(gamma_J[:, None] - gamma_J[None, :], 0.0))
            a_JJ = (beta_J[:, None] * decay_JJ) * kk_JJ
            pair_JJ = at * (ROWS * ROWS) + row_J[:, None] * ROWS + column_1J
            dtype = earlier_ptr.dtype.element_ty
            tl.store(earlier_ptr + pair_JJ, tl.where(is_before_JJ, -a_JJ, 0.0).to(dtype))
            p_JJ = tl.where(column_1J <= row_J[:, None], decay_JJ * qk_JJ, 0.0)
            tl.store(p_ptr + pair_JJ, p_JJ.to(dtype))
            own_JJ = at * (BLOCKS * SUB * SUB) + row_J[:, None] * SUB + column_1J % SUB
            tl.store(own_ptr + own_JJ, a_JJ, mask=is_own_JJ)


def delta_rule_chunks(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor, shape: DeltaShape,
    rows: SlotRows | None = None, state: DeltaState | None = None,
) -> Chunks:  # fmt: skip
    """Launch for packed sequences or, with `rows` and `state`, for rows of slots. Inputs are contiguous."""
    num_tokens, num_sequences = len(q), len(cu_seqlens_B1) - 1
    chunks = empty_chunks(num_tokens, num_sequences, shape, k)
    slots = (None, None, None, None, None) if rows is None or state is None else (
        rows.slot_B, rows.first_position_B, state.open_k, state.open_gamma, state.chunk
    )  # fmt: skip
    _delta_rule_chunks_kernel[(chunk_numbers(num_tokens, num_sequences), shape.key_heads)](
        q, k, g, beta, cu_seqlens_B1, *slots, *chunks, num_sequences,
        HEADS=shape.value_heads, KEY_HEADS=shape.key_heads, KEY_SIZE=shape.key_size,
        BLOCK_K=key_block(shape.key_size), SLICES=shape.slices, SLOTS=rows is not None,
        num_warps=8, **({"enable_fp_fusion": False} if q.is_cuda else {}),
    )  # fmt: skip
    return chunks
