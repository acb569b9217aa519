"""MLA's attention with queries on the tensor core's long side: the kernel of chunked prefill and of training.

All heads read the same keys, so a program's rows are `ROWS` pairs of token and head, counted token by token. With 16
heads, 64 rows are four tokens that share every load. The keys are packed or in pages, as for `attention_rows`.

A row's output has C = 512 elements, and an order by chunks needs two accumulators of that width. They would fill a
multiprocessor's registers twice. A launch therefore computes one half of the output's columns: scores twice, values
once, 1.5 times the multiplications. No bit depends on it, because a column's sum does not depend on other columns.

Packed latents of 512 elements run in Gluon on Hopper, whole rows in one launch (latent_rows_gluon.py). Its bits are the
same.

R rows, N keys of a tile, T tokens, H heads, C latent size, L half of it, padded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.attention_order import CLASSES, KV_CHUNK, LOG2E, LOWEST, merge_rows
from octetrl.kernels.attention.latent_order import (
    LATENT_TILE,
    latent_row_numbers,
    load_values,
    update_latent_rows,
)
from octetrl.kernels.gluon import COMPILER_ERRORS, can_run, give_up

ROWS = 64
SMALLEST_BLOCK = 16  # of a product's depth
GLUON_SIZES = 512, 64  # latent and rotary key of the models that have this attention


@triton.jit
def _latent_rows_tile(
    qa_RL, qb_RL, qr_RK, m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, start, position_R, num_keys, first_key,
    latent_ptr, key_ptr, scale_ptr, table_ptr, score_scale,
    ROWS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK_R: tl.constexpr, PAGE_SIZE: tl.constexpr, CODES: tl.constexpr, HALF: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Process one tile; first merge the last chunk if this tile begins another."""
    key_N = start + tl.arange(0, N)
    there_N = key_N < num_keys
    row_N = latent_row_numbers(table_ptr, start, num_keys, first_key, PAGE_SIZE, N)
    a_NL = load_values(latent_ptr, scale_ptr, row_N, there_N, 0, LATENT, BLOCK_L, CODES)
    b_NL = load_values(latent_ptr, scale_ptr, row_N, there_N, BLOCK_L, LATENT, BLOCK_L, CODES)
    key_NK = load_values(key_ptr, scale_ptr, row_N, there_N, 0, ROTARY, BLOCK_R, False)
    s_RN = tl.dot(qa_RL, tl.trans(a_NL))
    s_RN = tl.dot(qb_RL, tl.trans(b_NL), s_RN)
    s_RN = tl.dot(qr_RK, tl.trans(key_NK), s_RN)
    s_RN = s_RN * score_scale
    if MASKED:
        s_RN = tl.where(position_R[:, None] >= key_N[None, :], s_RN, float("-inf"))
    if start % CHUNK == 0 and start > 0:
        m_R, l_R, o_RL = merge_rows(m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, ROWS)
        m_chunk_R = tl.full([ROWS], LOWEST, tl.float32)
    v_NL = a_NL if HALF == 0 else b_NL
    m_chunk_R, l_chunk_RX, o_chunk_RL = update_latent_rows(s_RN, m_chunk_R, l_chunk_RX, o_chunk_RL, v_NL, ROWS)
    return m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL


@triton.jit(do_not_specialize=["stride_table"])
def _latent_rows_kernel(
    q_latent_ptr, q_rotary_ptr, latent_ptr, key_ptr, scale_ptr, out_ptr, table_ptr, cu_seqlens_ptr, contexts_ptr,
    stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_out_token, stride_out_head, stride_table,
    score_scale,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, ROTARY: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, CODES: tl.constexpr,
    HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the rows with the most keys start first
    sequence = tl.program_id(1)
    first_query = tl.load(cu_seqlens_ptr + sequence)
    num_queries = tl.load(cu_seqlens_ptr + sequence + 1) - first_query
    num_keys = num_queries if PAGE_SIZE == 0 else tl.load(contexts_ptr + sequence)
    if block * ROWS < num_queries * HEADS:
        row_R = block * ROWS + tl.arange(0, ROWS)
        inside_R = row_R < num_queries * HEADS
        query_R = row_R // HEADS
        head_R = row_R % HEADS
        before = num_keys - num_queries
        position_R = before + query_R
        token_R = first_query.to(tl.int64) + query_R
        l_L = tl.arange(0, BLOCK_L)
        r_K = tl.arange(0, BLOCK_R)
        ql_ptr_RL = (q_latent_ptr + token_R * stride_ql_token + head_R * stride_ql_head)[:, None] + l_L[None, :]
        qr_ptr_RK = (q_rotary_ptr + token_R * stride_qr_token + head_R * stride_qr_head)[:, None] + r_K[None, :]
        qa_RL = tl.load(ql_ptr_RL, mask=inside_R[:, None] & (l_L < LATENT)[None, :], other=0.0)
        qb_RL = tl.load(ql_ptr_RL + BLOCK_L, mask=inside_R[:, None] & (l_L + BLOCK_L < LATENT)[None, :], other=0.0)
        qr_RK = tl.load(qr_ptr_RK, mask=inside_R[:, None] & (r_K < ROTARY)[None, :], other=0.0)
        if PAGE_SIZE > 0:
            table_ptr += sequence.to(tl.int64) * stride_table
        m_R = tl.full([ROWS], LOWEST, tl.float32)
        l_R = tl.zeros([ROWS], tl.float32)
        o_RL = tl.zeros([ROWS, BLOCK_L], tl.float32)
        m_chunk_R = tl.full([ROWS], LOWEST, tl.float32)
        l_chunk_RX = tl.zeros([ROWS, CLASSES], tl.float32)
        o_chunk_RL = tl.zeros([ROWS, BLOCK_L], tl.float32)
        whole = (before + block * ROWS // HEADS + 1) // N * N
        end = tl.minimum(num_keys, before + (block * ROWS + ROWS - 1) // HEADS + 1)
        for start in tl.range(0, whole, N, num_stages=STAGES):
            m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL = _latent_rows_tile(
                qa_RL, qb_RL, qr_RK, m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, start, position_R, num_keys,
                first_query, latent_ptr, key_ptr, scale_ptr, table_ptr, score_scale,
                ROWS, N, CHUNK, LATENT, BLOCK_L, ROTARY, BLOCK_R, PAGE_SIZE, CODES, HALF, False,
            )  # fmt: skip
        for start in tl.range(whole, end, N, num_stages=1):
            m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL = _latent_rows_tile(
                qa_RL, qb_RL, qr_RK, m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, start, position_R, num_keys,
                first_query, latent_ptr, key_ptr, scale_ptr, table_ptr, score_scale,
                ROWS, N, CHUNK, LATENT, BLOCK_L, ROTARY, BLOCK_R, PAGE_SIZE, CODES, HALF, True,
            )  # fmt: skip
        m_R, l_R, o_RL = merge_rows(m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, ROWS)
        l_safe_R = tl.where(num_keys > 0, l_R, 1.0)  # a padding sequence gives zeros; NaN stays NaN
        out_RL = o_RL * tl.div_rn(tl.full([ROWS], 1.0, tl.float32), l_safe_R)[:, None]
        column_L = HALF * BLOCK_L + l_L
        out_ptr_RL = (out_ptr + token_R * stride_out_token + head_R * stride_out_head)[:, None] + column_L[None, :]
        tl.store(out_ptr_RL, out_RL.to(out_ptr.dtype.element_ty), mask=inside_R[:, None] & (column_L < LATENT)[None, :])


def latent_rows(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    latents: Tensor,
    keys: Tensor,
    cu_seqlens_B1: Tensor,
    max_query_len: int,
    softmax_scale: float,
    token_scale: Tensor | None = None,
    block_table_BP: Tensor | None = None,
    context_lens_B: Tensor | None = None,
    *,
    gluon: bool = True,
) -> Tensor:
    """Launch for packed latents [T, C] and keys [T, R] or, with a block table, for pages of `latent_store`.

    Returns out [T, H, C], a view of [H, T, C], zero outside every sequence. `gluon`: whether Gluon may run; no bit
    depends on it.
    """
    (tokens, heads, latent), rotary = q_latent_THC.shape, q_rotary_THR.shape[2]
    assert q_latent_THC.stride(2) == q_rotary_THR.stride(2) == 1, "latent attention: the last axis must be contiguous"
    assert latents.is_contiguous() and keys.is_contiguous(), "latent attention: latents and keys must be contiguous"
    assert token_scale is None or token_scale.is_contiguous(), "latent attention: scales must be contiguous"
    page_size = 0 if block_table_BP is None else latents.shape[1]
    assert page_size == 0 or LATENT_TILE % page_size == 0 or page_size % LATENT_TILE == 0, f"page size {page_size}"
    out_THC = torch.zeros(heads, tokens, latent, dtype=q_latent_THC.dtype, device=latents.device).transpose(0, 1)
    if gluon and page_size == 0 and (latent, rotary) == GLUON_SIZES and latents.dtype == torch.bfloat16 and tokens:
        operands = q_latent_THC, q_rotary_THR, latents, keys, cu_seqlens_B1, max_query_len, softmax_scale
        if _run_gluon(*operands, out_THC):
            return out_THC
    grid = (triton.cdiv(max_query_len * heads, ROWS), cu_seqlens_B1.numel() - 1)
    options = {"enable_fp_fusion": False} if latents.is_cuda else {}
    block_l = max(SMALLEST_BLOCK, triton.next_power_of_2(latent) // 2)
    for half in range(2 if tokens else 0):
        _latent_rows_kernel[grid](
            q_latent_THC, q_rotary_THR, latents, keys, token_scale, out_THC, block_table_BP, cu_seqlens_B1,
            context_lens_B, *q_latent_THC.stride()[:2], *q_rotary_THR.stride()[:2], *out_THC.stride()[:2],
            0 if block_table_BP is None else block_table_BP.stride(0), softmax_scale * LOG2E,
            HEADS=heads, LATENT=latent, BLOCK_L=block_l, ROTARY=rotary,
            BLOCK_R=max(SMALLEST_BLOCK, triton.next_power_of_2(rotary)), PAGE_SIZE=page_size, ROWS=ROWS,
            N=LATENT_TILE, CHUNK=KV_CHUNK, CODES=latents.dtype == E4M3, HALF=half, STAGES=2, num_warps=8, **options,
        )  # fmt: skip
    return out_THC


def _run_gluon(q_latent_THC: Tensor, q_rotary_THR: Tensor, latents: Tensor, keys: Tensor, *others: Any) -> bool:
    """Whether it ran."""
    if not can_run("latent_rows_gluon", latents, keys):
        return False
    try:
        from octetrl.kernels.attention.latent_rows_gluon import latent_rows_gluon

        latent_rows_gluon(q_latent_THC, q_rotary_THR, latents, keys, *others)
    except COMPILER_ERRORS as error:
        give_up("latent_rows_gluon", error)
        return False
    return True
