"""MLA's decode: attention of one query per sequence over pages of latents.

Keys are on the tensor core's long side and `COLUMNS` heads on the short side, so 16 heads waste nothing. A program
reads a sequence's latents once for these heads, and each latent is key and value.

**Large batches.** One program per sequence and block of heads goes through all keys and merges chunks as it goes.

**Small batches.** A program computes one chunk of one sequence and writes its m, l and o in float32; programs past the
context return at once, so a captured grid needs no lengths. A second kernel merges the chunks in ascending order. Both
ways have the same bits, because the order is defined by chunks.

Pages of E4M3 latents of 512 elements run in Gluon on Hopper, by chunks (latent_decode_gluon.py), with the same bits. On
one H200, decode of 256 sequences of 640 tokens took 62 microseconds instead of 141, of 64 sequences of up to 4,096
tokens 70 instead of 386. BF16 pages need 4 warps: 68 and 163 microseconds instead of 85 and 221.

B sequences, P pages of the longest block table, H heads, C query columns, N keys of a tile, L latent elements, S
chunks.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.attention_order import (
    CLASSES,
    KV_CHUNK,
    LOG2E,
    LOWEST,
    merge_columns,
    total_of_columns,
)
from octetrl.kernels.attention.decode_layout import MULTIPROCESSORS, SPLIT_BYTES
from octetrl.kernels.attention.latent_order import (
    LATENT_TILE,
    latent_row_numbers,
    load_values,
    update_latent_columns,
)
from octetrl.kernels.attention.latent_rows import GLUON_SIZES, SMALLEST_BLOCK
from octetrl.kernels.attention.records import CachedPages
from octetrl.kernels.gluon import COMPILER_ERRORS, can_run, give_up

COLUMNS = 16  # heads of one program
GLUON_SPLIT_BYTES = 1 << 28  # the largest size of the chunks' outputs where Gluon computes them
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Any, Tensor, Tensor, float]  # of the Gluon kernel


@triton.jit
def _store_columns(o_ptr, o_LC, row_C, inside_C, LATENT: tl.constexpr, BLOCK_L: tl.constexpr):
    """Store [L, C] as rows of [..., LATENT], one for each column."""
    l_L = tl.arange(0, BLOCK_L)
    mask_LC = (l_L < LATENT)[:, None] & inside_C[None, :]
    tl.store(o_ptr + row_C[None, :] * LATENT + l_L[:, None], o_LC.to(o_ptr.dtype.element_ty), mask=mask_LC)


@triton.jit(do_not_specialize=["stride_table", "max_chunks"])
def _latent_decode_kernel(
    q_latent_ptr, q_rotary_ptr, latent_ptr, key_ptr, scale_ptr, out_ptr, table_ptr, contexts_ptr, m_ptr, l_ptr, o_ptr,
    stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_table, max_chunks, score_scale,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, ROTARY: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, CODES: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    head_C = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sequence = tl.program_id(1).to(tl.int64)
    inside_C = head_C < HEADS
    num_keys = tl.load(contexts_ptr + sequence)
    first = tl.program_id(2) * CHUNK
    if first < num_keys or not SPLIT:
        l_L = tl.arange(0, BLOCK_L)
        r_K = tl.arange(0, BLOCK_R)
        ql_ptr_CL = (q_latent_ptr + sequence * stride_ql_token + head_C * stride_ql_head)[:, None] + l_L[None, :]
        qr_ptr_CK = (q_rotary_ptr + sequence * stride_qr_token + head_C * stride_qr_head)[:, None] + r_K[None, :]
        ql_CL = tl.load(ql_ptr_CL, mask=inside_C[:, None] & (l_L < LATENT)[None, :], other=0.0)
        qr_CK = tl.load(qr_ptr_CK, mask=inside_C[:, None] & (r_K < ROTARY)[None, :], other=0.0)
        table_ptr += sequence * stride_table
        m_C = tl.full([COLUMNS], LOWEST, tl.float32)
        l_C = tl.zeros([COLUMNS], tl.float32)
        o_LC = tl.zeros([BLOCK_L, COLUMNS], tl.float32)
        m_chunk_C = tl.full([COLUMNS], LOWEST, tl.float32)
        l_chunk_XC = tl.zeros([CLASSES, COLUMNS], tl.float32)
        o_chunk_LC = tl.zeros([BLOCK_L, COLUMNS], tl.float32)
        end = tl.minimum(first + CHUNK, num_keys) if SPLIT else num_keys
        for start in tl.range(first, end, N, num_stages=STAGES):
            key_N = start + tl.arange(0, N)
            there_N = key_N < num_keys
            row_N = latent_row_numbers(table_ptr, start, num_keys, 0, PAGE_SIZE, N)
            value_NL = load_values(latent_ptr, scale_ptr, row_N, there_N, 0, LATENT, BLOCK_L, CODES)
            key_NK = load_values(key_ptr, scale_ptr, row_N, there_N, 0, ROTARY, BLOCK_R, False)
            s_NC = tl.dot(value_NL, tl.trans(ql_CL))
            s_NC = tl.dot(key_NK, tl.trans(qr_CK), s_NC)
            s_NC = tl.where(there_N[:, None], s_NC * score_scale, float("-inf"))
            if not SPLIT and start % CHUNK == 0 and start > 0:
                m_C, l_C, o_LC = merge_columns(
                    m_C, l_C, o_LC, m_chunk_C, total_of_columns(l_chunk_XC, COLUMNS), o_chunk_LC
                )
                m_chunk_C = tl.full([COLUMNS], LOWEST, tl.float32)
            m_chunk_C, l_chunk_XC, o_chunk_LC = update_latent_columns(
                s_NC, m_chunk_C, l_chunk_XC, o_chunk_LC, value_NL, COLUMNS
            )
        l_chunk_C = total_of_columns(l_chunk_XC, COLUMNS)
        if SPLIT:
            row_C = (sequence * max_chunks + tl.program_id(2)) * HEADS + head_C
            tl.store(m_ptr + row_C, m_chunk_C, mask=inside_C)
            tl.store(l_ptr + row_C, l_chunk_C, mask=inside_C)
            _store_columns(o_ptr, o_chunk_LC, row_C, inside_C, LATENT, BLOCK_L)
        else:
            m_C, l_C, o_LC = merge_columns(m_C, l_C, o_LC, m_chunk_C, l_chunk_C, o_chunk_LC)
            l_C = tl.where(num_keys > 0, l_C, 1.0)  # a padding sequence gives zeros; NaN stays NaN
            o_LC = o_LC * tl.div_rn(tl.full([COLUMNS], 1.0, tl.float32), l_C)[None, :]
            _store_columns(out_ptr, o_LC, sequence * HEADS + head_C, inside_C, LATENT, BLOCK_L)


@triton.jit(do_not_specialize=["max_chunks"])
def _latent_merge_kernel(
    m_ptr, l_ptr, o_ptr, out_ptr, contexts_ptr, max_chunks,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Output of one sequence and head from its chunks."""
    head_C = tl.program_id(0) + tl.arange(0, 1)
    sequence = tl.program_id(1).to(tl.int64)
    num_keys = tl.load(contexts_ptr + sequence)
    l_L = tl.arange(0, BLOCK_L)
    inside_LC = (l_L < LATENT)[:, None] & (head_C >= 0)[None, :]
    m_C = tl.full([1], LOWEST, tl.float32)
    l_C = tl.zeros([1], tl.float32)
    o_LC = tl.zeros([BLOCK_L, 1], tl.float32)
    for chunk in tl.range(0, (num_keys + CHUNK - 1) // CHUNK):
        row_C = (sequence * max_chunks + chunk) * HEADS + head_C
        o_chunk_LC = tl.load(o_ptr + row_C[None, :] * LATENT + l_L[:, None], mask=inside_LC, other=0.0)
        m_C, l_C, o_LC = merge_columns(m_C, l_C, o_LC, tl.load(m_ptr + row_C), tl.load(l_ptr + row_C), o_chunk_LC)
    l_C = tl.where(num_keys > 0, l_C, 1.0)
    o_LC = o_LC * tl.div_rn(tl.full([1], 1.0, tl.float32), l_C)[None, :]
    _store_columns(out_ptr, o_LC, sequence * HEADS + head_C, head_C >= 0, LATENT, BLOCK_L)


def latent_decode(
    q_latent_BHC: Tensor,
    q_rotary_BHR: Tensor,
    latent: CachedPages,
    key: CachedPages,
    block_table_BP: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    split: bool | Literal["chosen"] = "chosen",
    *,
    gluon: bool = True,
) -> Tensor:
    """One query per sequence; out [B, H, C]. `split`: whether chunks are computed apart. `gluon`: whether Gluon may
    compute them. No bit depends on either."""
    (sequences, heads, size), rotary = q_latent_BHC.shape, q_rotary_BHR.shape[2]
    page_size, device = latent.pages.shape[1], latent.pages.device
    assert sequences == context_lens_B.shape[0], "decode takes exactly one query a sequence"
    assert q_latent_BHC.stride(2) == q_rotary_BHR.stride(2) == 1, "latent attention: the last axis must be contiguous"
    assert latent.pages.is_contiguous() and key.pages.is_contiguous(), "latent attention: pages must be contiguous"
    assert LATENT_TILE % page_size == 0 or page_size % LATENT_TILE == 0, f"page size {page_size}"
    max_chunks = triton.cdiv(block_table_BP.shape[1] * page_size, KV_CHUNK)
    blocks = triton.cdiv(heads, COLUMNS)
    codes = latent.pages.dtype == E4M3
    gluon = (
        gluon and codes and (size, rotary) == GLUON_SIZES and page_size % LATENT_TILE == 0
        and q_latent_BHC.dtype == q_rotary_BHR.dtype == torch.bfloat16
        and can_run("latent_decode_gluon", latent.pages, key.pages)
    )  # fmt: skip
    if split == "chosen":
        few_and_long = max_chunks > 1 and sequences * blocks < MULTIPROCESSORS
        room = 4 * sequences * max_chunks * heads * size
        split = room <= GLUON_SPLIT_BYTES if gluon else few_and_long and room <= SPLIT_BYTES
    out_BHC = torch.empty(sequences, heads, size, dtype=q_latent_BHC.dtype, device=device)
    m_BSH = l_BSH = o_BSHC = None
    if split:
        m_BSH, l_BSH = torch.empty(2, sequences, max_chunks, heads, device=device).unbind()
        o_BSHC = torch.empty(sequences, max_chunks, heads, size, device=device)
    if sequences == 0:
        return out_BHC
    shape = {"HEADS": heads, "LATENT": size, "CHUNK": KV_CHUNK}
    block_l = max(2 * SMALLEST_BLOCK, triton.next_power_of_2(size))
    options = {"enable_fp_fusion": False} if latent.pages.is_cuda else {}
    operands = q_latent_BHC, q_rotary_BHR, latent.pages, key.pages, latent.token_scale
    chunks = None if m_BSH is None or l_BSH is None or o_BSHC is None else (m_BSH, l_BSH, o_BSHC)
    tables = *operands, block_table_BP, context_lens_B, softmax_scale
    if not (gluon and chunks is not None and _run_gluon(tables, chunks)):
        _latent_decode_kernel[(blocks, sequences, max_chunks if split else 1)](
            *operands, out_BHC, block_table_BP, context_lens_B, m_BSH, l_BSH, o_BSHC,
            *q_latent_BHC.stride()[:2], *q_rotary_BHR.stride()[:2], block_table_BP.stride(0),
            max_chunks, softmax_scale * LOG2E, BLOCK_L=block_l, ROTARY=rotary,
            BLOCK_R=max(SMALLEST_BLOCK, triton.next_power_of_2(rotary)), PAGE_SIZE=page_size, COLUMNS=COLUMNS,
            N=LATENT_TILE, CODES=codes, SPLIT=split, STAGES=2, num_warps=8 if codes or split else 4, **shape, **options,
        )  # fmt: skip
    if split:
        _latent_merge_kernel[(heads, sequences)](
            m_BSH, l_BSH, o_BSHC, out_BHC, context_lens_B, max_chunks, BLOCK_L=block_l, **shape, **options
        )
    return out_BHC


def _run_gluon(operands: Operands, chunks: tuple[Tensor, Tensor, Tensor]) -> bool:
    """Whether it ran: m, l and o of each chunk are in `chunks`."""
    try:
        from octetrl.kernels.attention.latent_decode_gluon import latent_decode_gluon

        latent_decode_gluon(*operands, chunks)
    except COMPILER_ERRORS as error:
        give_up("latent_decode_gluon", error)
        return False
    return True
