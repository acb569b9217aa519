"""The Triton kernels of `latent_backward.py`, which has their formulas and launches them.

I query rows, J keys of a block, N, R and V elements of a head's key, of the shared key and of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.kernels.attention.attention_order import LOG2E
from octetrl.kernels.attention.attention_packed_backward import ALIGN, find_sequence

LOWEST = tl.constexpr(-1e30)


class LatentGradients(NamedTuple):
    q_THX: Tensor  # [T, H, N + R]
    kv_THX: Tensor  # [T, H, N + V]
    key_THR: Tensor  # of the shared key, by every head


class LatentOperands(NamedTuple):
    """Views that TMA reads. `rows`: log-sum-exp in base 2, then delta, [2 H, T plus padding that aligns every
    sequence]."""

    q_THN: Tensor
    q_THR: Tensor
    dout_THV: Tensor
    k_THN: Tensor
    key_T1R: Tensor
    v_THV: Tensor
    rows: Tensor
    cu_seqlens_B1: Tensor

    @property
    def by_query(self) -> tuple[Tensor, ...]:
        return self.q_THN, self.q_THR, self.dout_THV

    @property
    def by_key(self) -> tuple[Tensor, ...]:
        return self.k_THN, self.key_T1R, self.v_THV

    def numbers(self, softmax_scale: float) -> tuple[float, ...]:
        """Arguments of all kernels; the last ones are the distances of neighbouring heads."""
        counts = self.cu_seqlens_B1.shape[0] - 1, self.q_THN.shape[0], self.rows.stride(0)
        heads = (x.stride(1) for x in (*self.by_query, self.k_THN, self.v_THV))
        return (softmax_scale * LOG2E, softmax_scale, *counts, *heads)

    @property
    def shape(self) -> dict[str, int]:
        sizes = {"NOPE": self.q_THN.shape[2], "ROTARY": self.q_THR.shape[2], "VALUE": self.v_THV.shape[2]}
        return {"HEADS": self.q_THN.shape[1], **sizes}

    def grid(self, block: int) -> tuple[int, int]:
        """Programs that suffice for blocks of this many rows, for any lengths."""
        return self.q_THN.shape[1], self.q_THN.shape[0] // block + self.cu_seqlens_B1.shape[0]


def for_tma(x_THD: Tensor) -> Tensor:
    """`x_THD`, or a copy if TMA cannot read it where it lies."""
    steps = (x_THD.stride(0), x_THD.stride(1), x_THD.data_ptr() // 2)
    return x_THD if x_THD.stride(2) == 1 and all(step % 8 == 0 for step in steps) else x_THD.contiguous()


def descriptor(x_THD: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor for `rows` tokens of one head of a view whose heads lie `stride(1)` elements apart."""
    T, H, D = x_THD.shape
    return TensorDescriptor(x_THD, [T, (H - 1) * x_THD.stride(1) + D], [x_THD.stride(0), 1], [rows, D])


@triton.jit
def _store_rows(ptr, x, row, length, stride, SIZE: tl.constexpr):
    """Store `x` in BF16 as rows of `stride` elements; rows from `length` on are skipped."""
    offset = row.to(tl.int64)[:, None] * stride + tl.arange(0, SIZE)[None, :]
    tl.store(ptr + offset, x.to(tl.bfloat16), mask=(row < length)[:, None])


@triton.jit
def _load_tile(nope_desc, rotary_desc, value_desc, row, head, rotary_head, strides):
    """A block's nope and rotary parts, and its values or gradients."""
    x_N = nope_desc.load([row, head * strides[0]])
    x_R = rotary_desc.load([row, rotary_head * strides[1]])
    x_V = value_desc.load([row, head * strides[2]])
    return x_N, x_R, x_V


@triton.jit
def _rows_tile(
    m_I, l_I, u_I, q_IN, q_IR, dout_IV, kn_desc, kr_desc, v_desc, head, k_strides, first, start, first_query, length,
    score_scale, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_JN, k_JR, v_JV = _load_tile(kn_desc, kr_desc, v_desc, first + start, head, 0, k_strides)
    s_IJ = tl.dot(q_IN, tl.trans(k_JN))
    s_IJ = tl.dot(q_IR, tl.trans(k_JR), s_IJ)
    dp_IJ = tl.dot(dout_IV, tl.trans(v_JV))
    if MASKED:  # for a row of the sequence, this also hides all keys past its end
        query_I = first_query + tl.arange(0, BLOCK_I)
        key_J = start + tl.arange(0, BLOCK_J)
        seen = query_I[:, None] >= key_J[None, :]
        s_IJ = tl.where(seen, s_IJ, float("-inf"))
        dp_IJ = tl.where(seen, dp_IJ, 0.0)
    m_new_I = tl.maximum(m_I, tl.max(s_IJ, 1) * score_scale)
    p_IJ = tl.exp2(s_IJ * score_scale - m_new_I[:, None])
    alpha_I = tl.exp2(m_I - m_new_I)
    l_I = l_I * alpha_I + tl.sum(p_IJ, 1)
    u_I = u_I * alpha_I + tl.sum(p_IJ * dp_IJ, 1)
    return m_new_I, l_I, u_I


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "stride_row"])
def _rows_kernel(
    qn_desc, qr_desc, dout_desc, kn_desc, kr_desc, v_desc, rows_ptr, cu_seqlens_ptr, score_scale,
    softmax_scale, num_sequences, num_tokens, stride_row, qn_head, qr_head, dout_head, kn_head, v_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence, first, length, number = find_sequence(
        tl.program_id(1), cu_seqlens_ptr, num_sequences, num_tokens, BLOCK_I
    )
    if (number * BLOCK_I < length) & (sequence < num_sequences):
        first_query = (tl.cdiv(length, BLOCK_I) - 1 - number) * BLOCK_I  # the last rows have the most keys: first
        q_strides = (qn_head, qr_head, dout_head)
        k_strides = (kn_head, 0, v_head)
        q_IN, q_IR, dout_IV = _load_tile(qn_desc, qr_desc, dout_desc, first + first_query, head, head, q_strides)
        m_I = tl.full([BLOCK_I], LOWEST, tl.float32)
        l_I = tl.zeros([BLOCK_I], tl.float32)
        u_I = tl.zeros([BLOCK_I], tl.float32)
        whole = first_query // BLOCK_J * BLOCK_J
        for start in tl.range(0, whole, BLOCK_J, num_stages=STAGES):
            m_I, l_I, u_I = _rows_tile(
                m_I, l_I, u_I, q_IN, q_IR, dout_IV, kn_desc, kr_desc, v_desc, head, k_strides, first, start,
                first_query, length, score_scale, BLOCK_I, BLOCK_J, False,
            )  # fmt: skip
        for start in tl.range(whole, tl.minimum(length, first_query + BLOCK_I), BLOCK_J, num_stages=MASKED_STAGES):
            m_I, l_I, u_I = _rows_tile(
                m_I, l_I, u_I, q_IN, q_IR, dout_IV, kn_desc, kr_desc, v_desc, head, k_strides, first, start,
                first_query, length, score_scale, BLOCK_I, BLOCK_J, True,
            )  # fmt: skip
        query_I = first_query + tl.arange(0, BLOCK_I)
        inside_I = query_I < length
        row_ptr_I = rows_ptr + head.to(tl.int64) * stride_row + (first // ALIGN + sequence) * ALIGN + query_I
        tl.store(row_ptr_I, m_I + tl.log2(l_I), mask=inside_I)
        tl.store(row_ptr_I + stride_row.to(tl.int64) * HEADS, u_I / l_I, mask=inside_I)


@triton.jit
def _dq_tile(
    dq_IN, dq_IR, q_IN, q_IR, dout_IV, lse2_I, delta_I, kn_desc, kr_desc, v_desc, head, k_strides, first, start,
    first_query, length, score_scale, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_JN, k_JR, v_JV = _load_tile(kn_desc, kr_desc, v_desc, first + start, head, 0, k_strides)
    key_J = start + tl.arange(0, BLOCK_J)
    if MASKED:
        k_JN = tl.where((key_J < length)[:, None], k_JN, 0.0)
        k_JR = tl.where((key_J < length)[:, None], k_JR, 0.0)
    s_IJ = tl.dot(q_IN, tl.trans(k_JN))
    s_IJ = tl.dot(q_IR, tl.trans(k_JR), s_IJ)
    dp_IJ = tl.dot(dout_IV, tl.trans(v_JV))
    ds_IJ = tl.exp2(s_IJ * score_scale - lse2_I[:, None]) * (dp_IJ - delta_I[:, None])
    if MASKED:
        query_I = first_query + tl.arange(0, BLOCK_I)
        ds_IJ = tl.where(query_I[:, None] >= key_J[None, :], ds_IJ, 0.0)
    ds_IJ = ds_IJ.to(tl.bfloat16)
    dq_IN = tl.dot(ds_IJ, k_JN, dq_IN)
    dq_IR = tl.dot(ds_IJ, k_JR, dq_IR)
    return dq_IN, dq_IR


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "stride_row"])
def _dq_kernel(
    qn_desc, qr_desc, dout_desc, kn_desc, kr_desc, v_desc, rows_ptr, dq_ptr, cu_seqlens_ptr, score_scale,
    softmax_scale, num_sequences, num_tokens, stride_row, qn_head, qr_head, dout_head, kn_head, v_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = NOPE + ROTARY
    head = tl.program_id(0)
    sequence, first, length, number = find_sequence(
        tl.program_id(1), cu_seqlens_ptr, num_sequences, num_tokens, BLOCK_I
    )
    if number * BLOCK_I < length:
        first_query = (tl.cdiv(length, BLOCK_I) - 1 - number) * BLOCK_I
        query_I = first_query + tl.arange(0, BLOCK_I)
        dq_IN = tl.zeros([BLOCK_I, NOPE], tl.float32)
        dq_IR = tl.zeros([BLOCK_I, ROTARY], tl.float32)
        if sequence < num_sequences:
            q_strides = (qn_head, qr_head, dout_head)
            k_strides = (kn_head, 0, v_head)
            q_IN, q_IR, dout_IV = _load_tile(qn_desc, qr_desc, dout_desc, first + first_query, head, head, q_strides)
            row_ptr_I = rows_ptr + head.to(tl.int64) * stride_row + (first // ALIGN + sequence) * ALIGN + query_I
            lse2_I = tl.load(row_ptr_I, mask=query_I < length, other=0.0)
            delta_I = tl.load(row_ptr_I + stride_row.to(tl.int64) * HEADS, mask=query_I < length, other=0.0)
            whole = first_query // BLOCK_J * BLOCK_J
            for start in tl.range(0, whole, BLOCK_J, num_stages=STAGES):
                dq_IN, dq_IR = _dq_tile(
                    dq_IN, dq_IR, q_IN, q_IR, dout_IV, lse2_I, delta_I, kn_desc, kr_desc, v_desc, head, k_strides,
                    first, start, first_query, length, score_scale, BLOCK_I, BLOCK_J, False,
                )  # fmt: skip
            for start in tl.range(whole, tl.minimum(length, first_query + BLOCK_I), BLOCK_J, num_stages=MASKED_STAGES):
                dq_IN, dq_IR = _dq_tile(
                    dq_IN, dq_IR, q_IN, q_IR, dout_IV, lse2_I, delta_I, kn_desc, kr_desc, v_desc, head, k_strides,
                    first, start, first_query, length, score_scale, BLOCK_I, BLOCK_J, True,
                )  # fmt: skip
        ptr = dq_ptr + (first.to(tl.int64) * HEADS + head) * SIZE
        _store_rows(ptr, dq_IN * softmax_scale, query_I, length, HEADS * SIZE, NOPE)
        _store_rows(ptr + NOPE, dq_IR * softmax_scale, query_I, length, HEADS * SIZE, ROTARY)


@triton.jit
def _dkdv_tile(
    dk_JN, dk_JR, dv_JV, k_JN, k_JR, v_JV, qn_desc, qr_desc, dout_desc, rows_desc, head, q_strides, first, first_row,
    start, first_key, length, score_scale,
    HEADS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    q_IN, q_IR, dout_IV = _load_tile(qn_desc, qr_desc, dout_desc, first + start, head, head, q_strides)
    lse2_I = tl.reshape(rows_desc.load([head, first_row + start]), [BLOCK_I])
    delta_I = tl.reshape(rows_desc.load([HEADS + head, first_row + start]), [BLOCK_I])
    query_I = start + tl.arange(0, BLOCK_I)
    inside_I = query_I < length
    if MASKED:
        q_IN = tl.where(inside_I[:, None], q_IN, 0.0)
        q_IR = tl.where(inside_I[:, None], q_IR, 0.0)
        dout_IV = tl.where(inside_I[:, None], dout_IV, 0.0)
        delta_I = tl.where(inside_I, delta_I, 0.0)
    s_JI = tl.dot(k_JN, tl.trans(q_IN))
    s_JI = tl.dot(k_JR, tl.trans(q_IR), s_JI)
    p_JI = tl.exp2(s_JI * score_scale - lse2_I[None, :])
    if MASKED:
        key_J = first_key + tl.arange(0, BLOCK_J)
        p_JI = tl.where((query_I[None, :] >= key_J[:, None]) & inside_I[None, :], p_JI, 0.0)
    dp_JI = tl.dot(v_JV, tl.trans(dout_IV))
    dv_JV = tl.dot(p_JI.to(tl.bfloat16), dout_IV, dv_JV)
    ds_JI = (p_JI * (dp_JI - delta_I[None, :])).to(tl.bfloat16)
    dk_JN = tl.dot(ds_JI, q_IN, dk_JN)
    dk_JR = tl.dot(ds_JI, q_IR, dk_JR)
    return dk_JN, dk_JR, dv_JV


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "stride_row"])
def _dkdv_kernel(
    qn_desc, qr_desc, dout_desc, kn_desc, kr_desc, v_desc, rows_desc, dkv_ptr, dkr_ptr, cu_seqlens_ptr, score_scale,
    softmax_scale, num_sequences, num_tokens, stride_row, qn_head, qr_head, dout_head, kn_head, v_head,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROTARY: tl.constexpr, VALUE: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, STAGES: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence, first, length, number = find_sequence(
        tl.program_id(1), cu_seqlens_ptr, num_sequences, num_tokens, BLOCK_J
    )
    first_key = number * BLOCK_J  # the first keys have the most queries: first
    if first_key < length:
        key_J = first_key + tl.arange(0, BLOCK_J)
        dk_JN = tl.zeros([BLOCK_J, NOPE], tl.float32)
        dk_JR = tl.zeros([BLOCK_J, ROTARY], tl.float32)
        dv_JV = tl.zeros([BLOCK_J, VALUE], tl.float32)
        if sequence < num_sequences:
            q_strides = (qn_head, qr_head, dout_head)
            k_strides = (kn_head, 0, v_head)
            k_JN, k_JR, v_JV = _load_tile(kn_desc, kr_desc, v_desc, first + first_key, head, 0, k_strides)
            first_row = (first // ALIGN + sequence) * ALIGN
            # tiles of queries: those on the diagonal, then whole ones, then a last one if the sequence ends inside it
            num_tiles = (length - first_key + BLOCK_I - 1) // BLOCK_I
            diagonal = tl.minimum((BLOCK_J + BLOCK_I - 1) // BLOCK_I, num_tiles)
            whole = tl.maximum((length - first_key) // BLOCK_I - diagonal, 0)
            begin = first_key + diagonal * BLOCK_I
            for start in tl.range(begin, begin + whole * BLOCK_I, BLOCK_I, num_stages=STAGES):
                dk_JN, dk_JR, dv_JV = _dkdv_tile(
                    dk_JN, dk_JR, dv_JV, k_JN, k_JR, v_JV, qn_desc, qr_desc, dout_desc, rows_desc, head, q_strides,
                    first, first_row, start, first_key, length, score_scale, HEADS, BLOCK_I, BLOCK_J, False,
                )  # fmt: skip
            for turn in tl.range(0, num_tiles - whole, num_stages=MASKED_STAGES):
                start = first_key + tl.where(turn < diagonal, turn, turn + whole) * BLOCK_I
                dk_JN, dk_JR, dv_JV = _dkdv_tile(
                    dk_JN, dk_JR, dv_JV, k_JN, k_JR, v_JV, qn_desc, qr_desc, dout_desc, rows_desc, head, q_strides,
                    first, first_row, start, first_key, length, score_scale, HEADS, BLOCK_I, BLOCK_J, True,
                )  # fmt: skip
        token_head = first.to(tl.int64) * HEADS + head
        ptr = dkv_ptr + token_head * (NOPE + VALUE)
        _store_rows(ptr, dk_JN * softmax_scale, key_J, length, HEADS * (NOPE + VALUE), NOPE)
        _store_rows(ptr + NOPE, dv_JV, key_J, length, HEADS * (NOPE + VALUE), VALUE)
        _store_rows(dkr_ptr + token_head * ROTARY, dk_JR * softmax_scale, key_J, length, HEADS * ROTARY, ROTARY)
