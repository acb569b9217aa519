"""The backward of the gated delta rule by kernels; delta_rule_packed.py has the formulas.

The forward's kernels run again and keep S at each chunk's start and d. Then

    inverse     (1 + A)^-1 of every chunk, row by row in float32         a program for each chunk and value head
    states      dX and dS, from the last chunk to the first              for each sequence, value head, 64 columns of V
    chunks      dq, dk, dv, dg and dbeta                                 for each chunk and key head

Operands of products are BF16, sums float32. It is deterministic: there are no atomics, and a key head's value heads are
added in order. dbeta = dX . d / beta, because d / beta is what the formula multiplies dX by.

N chunks, J rows of a chunk, K and V sizes of heads, S columns of V.
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
    Chunks,
    chunk_numbers,
    key_block,
    load_keys,
    rows_of,
    sequence_of,
)
from octetrl.kernels.delta_rule.delta_rule_rows import KeptChunks
from octetrl.shapes.delta_rule import CHUNK, SLICE, DeltaShape


@triton.jit(do_not_specialize=["num_sequences"])
def _inverse_backward_kernel(earlier_ptr, own_ptr, inverse_ptr, cu_seqlens_ptr, num_sequences, HEADS: tl.constexpr):
    """(1 + A)^-1 of a chunk."""
    number = tl.program_id(0)
    sequence = sequence_of(number, cu_seqlens_ptr, num_sequences)
    start, count = rows_of(sequence, cu_seqlens_ptr)
    if (number - (start // ROWS + 2 * sequence)) * ROWS < count:
        at = number.to(tl.int64) * HEADS + tl.program_id(1)
        row_J = tl.arange(0, ROWS)
        pair_JJ = row_J[:, None] * ROWS + row_J[None, :]
        inverse_JJ = tl.where(row_J[:, None] == row_J[None, :], 1.0, 0.0)
        for row in range(1, ROWS):
            minus_a_J = tl.load(earlier_ptr + at * (ROWS * ROWS) + row * ROWS + row_J).to(tl.float32)
            is_own_J = (row_J // SUB == row // SUB) & (row_J < row)
            own_J = own_ptr + at * (BLOCKS * SUB * SUB) + row * SUB + row_J % SUB
            minus_a_J -= tl.load(own_J, mask=is_own_J, other=0.0)
            sum_J = tl.sum(minus_a_J[:, None] * inverse_JJ, 0)
            inverse_JJ = tl.where(row_J[:, None] == row, inverse_JJ + sum_J[None, :], inverse_JJ)
        to_JJ = inverse_ptr + at * (ROWS * ROWS) + pair_JJ
        tl.store(to_JJ, inverse_JJ.to(inverse_ptr.dtype.element_ty))


@triton.jit
def _states_backward_kernel(
    do_ptr, q_ptr, k_ptr, beta_ptr, cu_seqlens_ptr, gamma_ptr, p_ptr, inverse_ptr, dx_ptr, dstates_ptr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dX [T, H, V], and dS at each chunk's end."""
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    key_head = head // (HEADS // KEY_HEADS)
    start, count = rows_of(sequence, cu_seqlens_ptr)
    column_S = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    d_K = tl.arange(0, BLOCK_K)
    row_J = tl.arange(0, ROWS)
    inside_SK = (column_S < VALUE_SIZE)[:, None] & (d_K < KEY_SIZE)[None, :]
    pair_JJ = row_J[:, None] * ROWS + row_J[None, :]
    ds_SK = tl.zeros([WIDTH, BLOCK_K], tl.float32)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    m = (count + ROWS - 1) // ROWS - 1
    while m >= 0:
        at = (start // ROWS + 2 * sequence + m).to(tl.int64) * HEADS + head
        offset_J = m * ROWS + row_J
        is_new_J = offset_J < count
        token_J = start + offset_J
        k_JK = load_keys(k_ptr, k_ptr, token_J, offset_J, is_new_J, d_K, key_head, 0, KEY_HEADS, KEY_SIZE, False)
        inside_SJ = (column_S < VALUE_SIZE)[:, None] & is_new_J[None, :]
        value_SJ = (token_J * HEADS + head)[None, :] * VALUE_SIZE + column_S[:, None]
        do_SJ = tl.load(do_ptr + value_SJ, mask=inside_SJ, other=0.0)
        gamma_J = tl.load(gamma_ptr + at * ROWS + row_J)
        last = tl.load(gamma_ptr + at * ROWS + ROWS - 1)
        beta_J = tl.load(beta_ptr + token_J * HEADS + head, mask=is_new_J, other=0.0)
        of_state_SK = at * (VALUE_SIZE * KEY_SIZE) + column_S[:, None] * KEY_SIZE + d_K[None, :]
        rounded_SK = ds_SK.to(dtype)
        tl.store(dstates_ptr + of_state_SK, rounded_SK, mask=inside_SK)
        dd_SJ = tl.dot(rounded_SK, tl.trans(k_JK)) * tl.exp(last - gamma_J)[None, :]
        dd_SJ = tl.dot(do_SJ, tl.load(p_ptr + at * (ROWS * ROWS) + pair_JJ), dd_SJ)
        inverse_JJ = tl.load(inverse_ptr + at * (ROWS * ROWS) + pair_JJ)
        dx_SJ = tl.dot(dd_SJ.to(dtype), inverse_JJ)
        tl.store(dx_ptr + value_SJ, dx_SJ.to(dtype), mask=inside_SJ)
        weight_J = tl.exp(gamma_J)
        q_JK = load_keys(q_ptr, q_ptr, token_J, offset_J, is_new_J, d_K, key_head, 0, KEY_HEADS, KEY_SIZE, False)
        ds_SK = tl.exp(last) * ds_SK
        ds_SK = tl.dot((do_SJ.to(tl.float32) * weight_J[None, :]).to(dtype), q_JK, ds_SK)
        ds_SK = tl.dot((dx_SJ * (-beta_J * weight_J)[None, :]).to(dtype), k_JK, ds_SK)
        m -= 1


@triton.jit
def _load_values(x_ptr, token_J, is_new_J, head, column_V, HEADS: tl.constexpr, SIZE: tl.constexpr):
    inside_JV = is_new_J[:, None] & (column_V < SIZE)[None, :]
    return tl.load(x_ptr + (token_J * HEADS + head)[:, None] * SIZE + column_V[None, :], mask=inside_JV, other=0.0)


@triton.jit(do_not_specialize=["num_sequences"])
def _chunks_backward_kernel(
    do_ptr, q_ptr, k_ptr, beta_ptr, cu_seqlens_ptr, gamma_ptr, states_ptr, d_ptr, dx_ptr, dstates_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, num_sequences,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    key_head = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    sequence = sequence_of(number, cu_seqlens_ptr, num_sequences)
    start, count = rows_of(sequence, cu_seqlens_ptr)
    row_J = tl.arange(0, ROWS)
    offset_J = (number - (start // ROWS + 2 * sequence)) * ROWS + row_J
    if tl.min(offset_J, 0) < count:
        is_new_J = offset_J < count
        token_J = start + offset_J
        d_K = tl.arange(0, BLOCK_K)
        k_JK = load_keys(k_ptr, k_ptr, token_J, offset_J, is_new_J, d_K, key_head, 0, KEY_HEADS, KEY_SIZE, False)
        q_JK = load_keys(q_ptr, q_ptr, token_J, offset_J, is_new_J, d_K, key_head, 0, KEY_HEADS, KEY_SIZE, False)
        dq_JK = tl.zeros([ROWS, BLOCK_K], tl.float32)
        dk_JK = tl.zeros([ROWS, BLOCK_K], tl.float32)
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        kk_JJ = tl.dot(k_JK, tl.trans(k_JK))
        qk_JJ = tl.dot(q_JK, tl.trans(k_JK))
        for member in tl.range(GROUP, num_stages=1):
            head = key_head * GROUP + member
            at = number.to(tl.int64) * HEADS + head
            gamma_J = tl.load(gamma_ptr + at * ROWS + row_J)
            last = tl.load(gamma_ptr + at * ROWS + ROWS - 1)
            beta_J = tl.load(beta_ptr + token_J * HEADS + head, mask=is_new_J, other=0.0)
            weight_J = tl.exp(gamma_J)
            rest_J = tl.exp(last - gamma_J)
            ep_JJ = tl.zeros([ROWS, ROWS], tl.float32)
            m_JJ = tl.zeros([ROWS, ROWS], tl.float32)
            dgamma_J = tl.zeros([ROWS], tl.float32)
            h_J = tl.zeros([ROWS], tl.float32)  # taken from this row's Gamma, and added to the last one's
            dbeta_J = tl.zeros([ROWS], tl.float32)
            for part in tl.range(SLICES, num_stages=1):
                column_S = part * WIDTH + tl.arange(0, WIDTH)
                do_JS = _load_values(do_ptr, token_J, is_new_J, head, column_S, HEADS, VALUE_SIZE)
                d_JS = _load_values(d_ptr, token_J, is_new_J, head, column_S, HEADS, VALUE_SIZE)
                dx_JS = _load_values(dx_ptr, token_J, is_new_J, head, column_S, HEADS, VALUE_SIZE)
                ep_JJ = tl.dot(do_JS, tl.trans(d_JS), ep_JJ)
                m_JJ = tl.dot(dx_JS, tl.trans(d_JS), m_JJ)
                inside_SK = (column_S < VALUE_SIZE)[:, None] & (d_K < KEY_SIZE)[None, :]
                of_state_SK = at * (VALUE_SIZE * KEY_SIZE) + column_S[:, None] * KEY_SIZE + d_K[None, :]
                s_SK = tl.load(states_ptr + of_state_SK, mask=inside_SK, other=0.0)
                ds_SK = tl.load(dstates_ptr + of_state_SK, mask=inside_SK, other=0.0)
                dos_JK = weight_J[:, None] * tl.dot(do_JS, s_SK)
                dgamma_J += tl.sum(dos_JK * q_JK.to(tl.float32), 1)
                dq_JK += dos_JK
                dxs_JK = (-beta_J * weight_J)[:, None] * tl.dot(dx_JS, s_SK)
                wds_JK = rest_J[:, None] * tl.dot(d_JS, ds_SK)
                h_J += tl.sum(wds_JK * k_JK.to(tl.float32), 1)
                dgamma_J += tl.sum(dxs_JK * k_JK.to(tl.float32), 1)
                dk_JK += dxs_JK + wds_JK
                both = tl.sum(tl.sum(s_SK.to(tl.float32) * ds_SK.to(tl.float32), 1), 0)
                dgamma_J += tl.where(row_J == ROWS - 1, tl.exp(last) * both, 0.0)
                dx_JS = dx_JS.to(tl.float32)
                value_JS = (token_J * HEADS + head)[:, None] * VALUE_SIZE + column_S[None, :]
                inside_JS = is_new_J[:, None] & (column_S < VALUE_SIZE)[None, :]
                tl.store(dv_ptr + value_JS, (beta_J[:, None] * dx_JS).to(dtype), mask=inside_JS)
                dbeta_J += tl.sum(dx_JS * d_JS.to(tl.float32), 1)

            decay_JJ = tl.exp(tl.minimum(gamma_J[:, None] - gamma_J[None, :], 0.0))
            ep_JJ = tl.where(row_J[None, :] <= row_J[:, None], decay_JJ * ep_JJ, 0.0)
            m_JJ = tl.where(row_J[None, :] < row_J[:, None], -(beta_J[:, None] * decay_JJ) * m_JJ, 0.0)
            both_JJ = ep_JJ * qk_JJ + m_JJ * kk_JJ
            dgamma_J += tl.sum(both_JJ, 1) - tl.sum(both_JJ, 0)
            ep_JJ = ep_JJ.to(dtype)
            dq_JK += tl.dot(ep_JJ, k_JK)
            dk_JK += tl.dot(tl.trans(ep_JJ), q_JK)
            dk_JK += tl.dot((m_JJ + tl.trans(m_JJ)).to(dtype), k_JK)
            dbeta_J = tl.where(beta_J > 0.0, dbeta_J / tl.where(beta_J > 0.0, beta_J, 1.0), 0.0)
            of_head_J = token_J * HEADS + head
            tl.store(dbeta_ptr + of_head_J, dbeta_J, mask=is_new_J)
            dg_J = tl.sum(tl.where(row_J[None, :] >= row_J[:, None], dgamma_J[None, :], h_J[None, :]), 1)
            tl.store(dg_ptr + of_head_J, dg_J, mask=is_new_J)
        key_JK = (token_J * KEY_HEADS + key_head)[:, None] * KEY_SIZE + d_K[None, :]
        inside_JK = is_new_J[:, None] & (d_K < KEY_SIZE)[None, :]
        tl.store(dq_ptr + key_JK, dq_JK.to(dtype), mask=inside_JK)
        tl.store(dk_ptr + key_JK, dk_JK.to(dtype), mask=inside_JK)


def delta_rule_packed_backward_triton(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_B1: Tensor, shape: DeltaShape,
    chunks: Chunks, kept: KeptChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dg and dbeta. Everything is contiguous; `chunks` and `kept` are those of the forward."""
    num_sequences, numbers = len(cu_seqlens_B1) - 1, chunk_numbers(len(q), len(cu_seqlens_B1) - 1)
    dq, dk, dv, dg, dbeta = (torch.zeros_like(x) for x in (q, k, v, g, beta))
    inverse = torch.empty(numbers, shape.value_heads, CHUNK, CHUNK, dtype=k.dtype, device=k.device)
    dx, dstates = torch.empty_like(v), torch.empty_like(kept.states)
    sizes = {
        "HEADS": shape.value_heads, "KEY_HEADS": shape.key_heads, "KEY_SIZE": shape.key_size,
        "VALUE_SIZE": shape.value_size, "BLOCK_K": key_block(shape.key_size),
    }  # fmt: skip
    _inverse_backward_kernel[(numbers, shape.value_heads)](
        chunks.earlier, chunks.own, inverse, cu_seqlens_B1, num_sequences, HEADS=shape.value_heads, num_warps=4
    )
    _states_backward_kernel[(shape.slices, num_sequences, shape.value_heads)](
        do, q, k, beta, cu_seqlens_B1, chunks.gamma, chunks.p, inverse, dx, dstates, **sizes, WIDTH=SLICE, num_warps=4
    )
    _chunks_backward_kernel[(numbers, shape.key_heads)](
        do, q, k, beta, cu_seqlens_B1, chunks.gamma, kept.states, kept.d, dx, dstates, dq, dk, dv, dg, dbeta,
        num_sequences, **sizes, WIDTH=SLICE, SLICES=shape.slices, num_warps=8,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta
