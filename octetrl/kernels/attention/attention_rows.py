"""Causal attention with queries on the tensor core's long side: the kernel of chunked prefill and of training.

One program takes `ROWS` queries of one head of one sequence and meets their keys tile by tile, by
`attention_order`. Tiles that every row may see whole run without a mask; the last one or two are masked.
Where the keys lie is the only difference between its two callers, so they share the code and with it the
bits:

    paged    key n is row `n % page_size` of page `block_table[b, n // page_size]`; codes are converted in the kernel
    packed   key n is token `cu_seqlens[b] + n`; codes come converted (`kv_replay`)

The page of the next tile is loaded one tile ahead and carried in a register: a table load inside the loop
would be pipelined too and halve the depth of the prefetch of K and V.

On an H200, packed, 16k tokens, head size 128: 413 TFLOP/s in BF16, 372 over converted codes, both of an earlier kernel
(benchmarks/results/kernels_attention.json), 408 in BF16 since (kernels_attention_backward.json).

R query rows, N keys of a tile, T tokens, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.config.spec import SUPPORTED_HEAD_SIZES
from octetrl.kernels.attention.attention_order import (
    CLASSES,
    KV_TILE,
    LOG2E,
    MODE_NUMBER,
    TRITON_DTYPE,
    load_pages,
    mode_of,
    operand_dtype,
    total_of_rows,
    update_rows,
)

SMALLEST_BLOCK_D = 64  # wgmma's shortest long side; smaller heads are padded with zeros, in every kernel alike


@triton.jit
def _rows_tile(
    q_RD, m_R, l_RX, o_RD, start, page, position_R, num_keys, first_key,
    k_ptr, v_ptr, stride_k_page, stride_k_token, stride_v_page, stride_v_token, stride_v_d, k_scale_ptr, v_scale_ptr,
    stride_scale_page, stride_scale_token, score_scale,
    ROWS: tl.constexpr, N: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    K_MODE: tl.constexpr, V_MODE: tl.constexpr, V_OPERAND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    key_N = start + tl.arange(0, N)
    d_D = tl.arange(0, BLOCK_D)
    if PAGE_SIZE == 0:
        row_N = (first_key + start).to(tl.int64) + tl.arange(0, N)
        scale_N = row_N * stride_scale_token
    else:
        k_ptr += page.to(tl.int64) * stride_k_page  # a page for each key where a tile spans several
        v_ptr += page.to(tl.int64) * stride_v_page
        if PAGE_SIZE > 0 and PAGE_SIZE < N:
            v_ptr = tl.max_constancy(v_ptr, PAGE_SIZE)  # so that turned codes load in words
        row_N = key_N % PAGE_SIZE
        scale_N = page.to(tl.int64) * stride_scale_page + row_N * stride_scale_token
    k_ptr_N = k_ptr + row_N * stride_k_token
    v_ptr_N = v_ptr + row_N * stride_v_token
    present_N = key_N < num_keys
    if MASKED:
        k_mask_DN = present_N[None, :] & (d_D < HEAD_SIZE)[:, None]
        v_mask_ND = present_N[:, None] & (d_D < HEAD_SIZE)[None, :]
        k_DN = tl.load(k_ptr_N[None, :] + d_D[:, None], mask=k_mask_DN, other=0.0).to(q_RD.dtype)
        v_ND = tl.load(v_ptr_N[:, None] + d_D[None, :] * stride_v_d, mask=v_mask_ND, other=0.0).to(V_OPERAND)
    else:
        if BLOCK_D == HEAD_SIZE:
            k_DN = tl.load(k_ptr_N[None, :] + d_D[:, None]).to(q_RD.dtype)
            v_ND = tl.load(v_ptr_N[:, None] + d_D[None, :] * stride_v_d).to(V_OPERAND)
        else:
            head_D = d_D < HEAD_SIZE
            k_DN = tl.load(k_ptr_N[None, :] + d_D[:, None], mask=head_D[:, None], other=0.0).to(q_RD.dtype)
            v_ND = tl.load(v_ptr_N[:, None] + d_D[None, :] * stride_v_d, mask=head_D[None, :], other=0.0).to(V_OPERAND)
    v_scale_N = score_scale
    if K_MODE == 2:
        k_scale_N = tl.load(k_scale_ptr + scale_N, mask=present_N, other=0.0)
    if V_MODE == 2:
        v_scale_N = tl.load(v_scale_ptr + scale_N, mask=present_N, other=0.0)
    s_RN = tl.dot(q_RD, k_DN)
    s_RN = s_RN * (k_scale_N * score_scale)[None, :] if K_MODE == 2 else s_RN * score_scale
    if MASKED:
        s_RN = tl.where(position_R[:, None] >= key_N[None, :], s_RN, float("-inf"))
    return update_rows(s_RN, m_R, l_RX, o_RD, v_ND, v_scale_N, ROWS, V_MODE)


@triton.jit(do_not_specialize=["stride_table"])
def _attention_rows_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse2_ptr, table_ptr, cu_seqlens_ptr, contexts_ptr, k_scale_ptr, v_scale_ptr,
    stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_token, stride_v_page, stride_v_head,
    stride_v_token, stride_v_d, stride_scale_page, stride_scale_head, stride_scale_token, stride_table, base_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, K_OPERAND: tl.constexpr,
    V_OPERAND: tl.constexpr, V_TURNED: tl.constexpr, STORE_LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    kv_head = head // GROUP
    first_query = tl.load(cu_seqlens_ptr + sequence)
    num_queries = tl.load(cu_seqlens_ptr + sequence + 1) - first_query
    num_keys = num_queries if PAGE_SIZE == 0 else tl.load(contexts_ptr + sequence)
    if block * ROWS < num_queries:
        before = num_keys - num_queries + block * ROWS  # position of the block's first query
        row_R = block * ROWS + tl.arange(0, ROWS)
        position_R = before + tl.arange(0, ROWS)
        d_D = tl.arange(0, BLOCK_D)
        token_R = first_query.to(tl.int64) + row_R
        inside_RD = (row_R < num_queries)[:, None] & (d_D < HEAD_SIZE)[None, :]
        q_RD = tl.load(
            q_ptr + token_R[:, None] * stride_q_token + head * stride_q_head + d_D[None, :], mask=inside_RD, other=0.0
        ).to(K_OPERAND)
        score_scale = base_scale
        out_scale = 1.0
        if K_MODE == 1:
            score_scale = base_scale * tl.load(k_scale_ptr + kv_head)
        if V_MODE == 1:
            out_scale = tl.load(v_scale_ptr + kv_head)
        if PAGE_SIZE > 0 and not V_TURNED:  # K and V share their offsets, or registers spill
            stride_v_page = stride_k_page
            stride_v_head = stride_k_head
            stride_v_token = stride_k_token
        k_ptr += kv_head * stride_k_head
        v_ptr += kv_head * stride_v_head
        k_token_ptr = k_scale_ptr
        v_token_ptr = v_scale_ptr
        if K_MODE == 2:
            k_token_ptr += kv_head * stride_scale_head
        if V_MODE == 2:
            v_token_ptr += kv_head * stride_scale_head
        if PAGE_SIZE > 0:
            table_ptr += sequence.to(tl.int64) * stride_table

        m_R = tl.full([ROWS], float("-inf"), tl.float32)
        l_RX = tl.zeros([ROWS, CLASSES], tl.float32)
        o_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
        unmasked_end = (before + 1) // N * N
        end = tl.minimum(num_keys, before + ROWS)
        page = first_query if PAGE_SIZE == 0 else load_pages(table_ptr, 0, num_keys, PAGE_SIZE, N)
        for start in tl.range(0, unmasked_end, N, num_stages=STAGES):
            here = page
            if PAGE_SIZE > 0:
                page = load_pages(table_ptr, start + N, num_keys, PAGE_SIZE, N)
            m_R, l_RX, o_RD = _rows_tile(
                q_RD, m_R, l_RX, o_RD, start, here, position_R, num_keys, first_query,
                k_ptr, v_ptr, stride_k_page, stride_k_token, stride_v_page, stride_v_token, stride_v_d, k_token_ptr,
                v_token_ptr, stride_scale_page, stride_scale_token, score_scale, ROWS, N, HEAD_SIZE, BLOCK_D,
                PAGE_SIZE, K_MODE, V_MODE, V_OPERAND, False,
            )  # fmt: skip
        for start in tl.range(unmasked_end, end, N, num_stages=1):
            here = page
            if PAGE_SIZE > 0:
                page = load_pages(table_ptr, start + N, num_keys, PAGE_SIZE, N)
            m_R, l_RX, o_RD = _rows_tile(
                q_RD, m_R, l_RX, o_RD, start, here, position_R, num_keys, first_query,
                k_ptr, v_ptr, stride_k_page, stride_k_token, stride_v_page, stride_v_token, stride_v_d, k_token_ptr,
                v_token_ptr, stride_scale_page, stride_scale_token, score_scale, ROWS, N, HEAD_SIZE, BLOCK_D,
                PAGE_SIZE, K_MODE, V_MODE, V_OPERAND, True,
            )  # fmt: skip

        l_R = total_of_rows(l_RX, ROWS)
        l_safe_R = tl.where(num_keys > 0, l_R, 1.0)  # a padding sequence gives zeros; NaN stays NaN
        out_RD = o_RD * tl.div_rn(tl.zeros_like(l_R) + out_scale, l_safe_R)[:, None]
        out_offset_RD = (token_R[:, None] * HEADS + head) * HEAD_SIZE + d_D[None, :]
        tl.store(out_ptr + out_offset_RD, out_RD.to(out_ptr.dtype.element_ty), mask=inside_RD)
        if STORE_LSE:
            tl.store(lse2_ptr + token_R * HEADS + head, m_R + tl.log2(l_R), mask=row_R < num_queries)


def _strides(x: Tensor, paged: bool) -> tuple[int, int, int]:
    """Of a page (none if packed), of a kv head and of a token."""
    return (x.stride(0), x.stride(1), x.stride(2)) if paged else (0, x.stride(1), x.stride(0))


def attention_rows(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_B1: Tensor,
    max_query_len: int,
    softmax_scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    block_table_BP: Tensor | None = None,
    context_lens_B: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch for packed K and V [T, K, D] or, with a block table, pages [num_pages, K, page_size, D].

    K and V each come as they are, or with scales: [K] for `calibrated`; for `dynamic` [T, K] or [num_pages, K,
    page_size]. K's last axis is contiguous. Pages of V lie as those of K, or turned (`kv_store.by_key`). Returns
    out [T, H, D], zero where no sequence lies, and for packed input lse2 [T, H].
    """
    num_tokens, num_heads, head_size = q_THD.shape
    assert head_size in SUPPORTED_HEAD_SIZES, f"head size {head_size} is not one of {SUPPORTED_HEAD_SIZES}"
    assert q_THD.stride(2) == k.stride(-1) == 1, "attention: the last axis must be contiguous"
    k_mode, v_mode = mode_of(k_scale), mode_of(v_scale)
    paged = block_table_BP is not None
    page_size = k.shape[2] if paged else 0
    strides = (*_strides(k, paged), *_strides(v, paged), v.stride(-1))
    turned = v.stride(-1) != 1
    assert turned or not paged or k.stride() == v.stride(), f"attention: pages of K {k.stride()} and V {v.stride()}"
    token_scales = [scale for scale in (k_scale, v_scale) if scale is not None and mode_of(scale) == "dynamic"]
    stride_scale = _strides(token_scales[0], paged) if token_scales else (0, 0, 0)
    assert all(_strides(scale, paged) == stride_scale for scale in token_scales), "attention: scales lie differently"
    out_THD = torch.zeros(num_tokens, num_heads, head_size, dtype=q_THD.dtype, device=q_THD.device)
    lse2_TH = None if paged else torch.zeros(num_tokens, num_heads, dtype=torch.float32, device=q_THD.device)
    rows, warps, stages = (64, 8, 1) if head_size == 256 else (128, 8, 2)
    grid = (triton.cdiv(max_query_len, rows), num_heads, cu_seqlens_B1.shape[0] - 1)
    if num_tokens == 0 or 0 in grid:
        return out_THD, lse2_TH
    _attention_rows_kernel[grid](
        q_THD, k, v, out_THD, lse2_TH, block_table_BP, cu_seqlens_B1, context_lens_B, k_scale, v_scale,
        q_THD.stride(0), q_THD.stride(1), *strides, *stride_scale,
        block_table_BP.stride(0) if block_table_BP is not None else 0, softmax_scale * LOG2E,
        HEADS=num_heads, GROUP=num_heads // k.shape[1], HEAD_SIZE=head_size, BLOCK_D=max(SMALLEST_BLOCK_D, head_size),
        PAGE_SIZE=page_size, ROWS=rows, N=KV_TILE, K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode],
        K_OPERAND=TRITON_DTYPE[operand_dtype(k.dtype, k_mode)], V_OPERAND=TRITON_DTYPE[operand_dtype(v.dtype, v_mode)],
        V_TURNED=turned, STORE_LSE=not paged, STAGES=stages, num_warps=warps,
        **({"enable_fp_fusion": False} if q_THD.is_cuda else {}),
    )  # fmt: skip
    return out_THD, lse2_TH
