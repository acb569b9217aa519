"""Causal attention with queries on the tensor core's long side: the kernel of chunked prefill and of training.

One program takes `ROWS` queries of one head of one sequence and loops over their keys, tile by tile, in the order of
`attention_order.py`, which also has the formula. Tiles without masked elements run without a mask; the last one or two
are masked. The two callers differ only in where the keys are. They share the code and therefore the bits:

    paged    key n is row `n % page_size` of page `block_table[b, n // page_size]`; codes are converted in the kernel
    packed   key n is token `cu_seqlens[b] + n`; codes are converted beforehand (`kv_replay`)

The page id of the next tile is loaded one tile ahead and kept in a register. A load of the table inside the loop would
be pipelined too and halve the depth of the prefetch of K and V.

K and V come by TMA if they can: packed K and V always, pages if a page is one tile; head size 64 or 128. Scales of
tokens come with them (`token_scales.py`). V's are read after the scores, because they take 32 registers. TMA needs few
registers, which leaves room for two accumulators, and three tiles in flight. q is converted to float16 once for
calibrated codes. It then goes through the program's own rows of `out`: wgmma reads an operand from shared memory only
if it was loaded, and from registers it would leave too few of them.

Heads of 128 elements without a window run in Gluon on Hopper (attention_rows_gluon.py), with the same bits; pages of K
in codes beside a V in BF16 do not.

R query rows, N keys of a tile, T tokens, H query heads, K kv heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.fp8.format import is_code
from octetrl.kernels.attention.attention_order import (
    CLASSES,
    KV_CHUNK,
    KV_TILE,
    LOG2E,
    LOWEST,
    MODE_NUMBER,
    SINK_SCALE,
    TMA_HEAD_SIZES,
    TRITON_DTYPE,
    as_operand,
    block_of_head,
    comes_by_tma,
    load_pages,
    merge_rows,
    mode_of,
    operand_dtype,
    rows_of_tiles,
    update_rows,
)
from octetrl.kernels.attention.kv_store import ReplayedKV
from octetrl.kernels.attention.token_scales import ScaleTable, align_scales, first_column, scale_table
from octetrl.kernels.gluon import COMPILER_ERRORS, can_run, give_up
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES

GLUON_HEAD_SIZE = 128


@triton.jit
def _load_tile(
    k_ptr, v_ptr, start, page, num_keys, first_key, kv_head,
    stride_k_page, stride_k_token, stride_v_page, stride_v_token, stride_v_d,
    N: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    V_TURNED: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """K and V [N, BLOCK_D] of one tile, in the dtype they are stored in."""
    present_N = start + tl.arange(0, N) < num_keys
    d_D = tl.arange(0, BLOCK_D)
    if TMA:
        if PAGE_SIZE == 0:
            k_ND = k_ptr.load([first_key + start, kv_head * HEAD_SIZE])
            v_ND = v_ptr.load([first_key + start, kv_head * HEAD_SIZE])
        else:
            matrix = page * KV_HEADS + kv_head  # one page of one head
            k_ND = k_ptr.load([matrix * N, 0])
            v_ND = tl.trans(v_ptr.load([matrix * HEAD_SIZE, 0])) if V_TURNED else v_ptr.load([matrix * N, 0])
    else:
        if PAGE_SIZE == 0:
            row_N = (first_key + start).to(tl.int64) + tl.arange(0, N)
        else:
            k_ptr += page.to(tl.int64) * stride_k_page  # one page for each key if a tile spans several
            v_ptr += page.to(tl.int64) * stride_v_page
            if PAGE_SIZE < N:
                v_ptr = tl.max_constancy(v_ptr, PAGE_SIZE)  # so that transposed codes load in words
            row_N = (start + tl.arange(0, N)) % PAGE_SIZE
        k_ptr_ND = (k_ptr + row_N * stride_k_token)[:, None] + d_D[None, :]
        v_ptr_ND = (v_ptr + row_N * stride_v_token)[:, None] + d_D[None, :] * stride_v_d
        head_1D = (d_D < HEAD_SIZE)[None, :]
        if MASKED:
            k_ND = tl.load(k_ptr_ND, mask=present_N[:, None] & head_1D, other=0.0)
            v_ND = tl.load(v_ptr_ND, mask=present_N[:, None] & head_1D, other=0.0)
        elif BLOCK_D == HEAD_SIZE:
            k_ND = tl.load(k_ptr_ND)
            v_ND = tl.load(v_ptr_ND)
        else:
            k_ND = tl.load(k_ptr_ND, mask=head_1D, other=0.0)
            v_ND = tl.load(v_ptr_ND, mask=head_1D, other=0.0)
    return k_ND, v_ND


@triton.jit
def _load_scales(
    scale_ptr, start, page, num_keys, first_key, first_scale, kv_head, stride_page, stride_head, stride_token,
    N: tl.constexpr, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scales [1, N] of one tile's keys, 0 past the sequence."""
    key_N = start + tl.arange(0, N)
    if TMA:
        if PAGE_SIZE == 0:
            scale_1N = scale_ptr.load([kv_head, first_scale + start])
        else:
            scale_1N = scale_ptr.load([page * KV_HEADS + kv_head, 0])
        if MASKED:
            scale_1N = tl.where((key_N < num_keys)[None, :], scale_1N, 0.0)
    else:
        if PAGE_SIZE == 0:
            token_N = ((first_key + start).to(tl.int64) + tl.arange(0, N)) * stride_token
        else:
            token_N = page.to(tl.int64) * stride_page + key_N % PAGE_SIZE * stride_token
        scale_N = tl.load(scale_ptr + kv_head * stride_head + token_N, mask=key_N < num_keys, other=0.0)
        scale_1N = scale_N[None, :]
    return scale_1N


@triton.jit
def _rows_tile(
    q_RD, m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD, start, page, position_R, num_keys, first_key, kv_head,
    k_ptr, v_ptr, stride_k_page, stride_k_token, stride_v_page, stride_v_token, stride_v_d, k_scale_ptr, v_scale_ptr,
    first_scale, stride_scale_page, stride_scale_head, stride_scale_token, score_scale,
    ROWS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr,
    V_OPERAND: tl.constexpr, V_TURNED: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Process one tile; first merge the last chunk if this tile begins another."""
    key_N = start + tl.arange(0, N)
    k_ND, v_ND = _load_tile(
        k_ptr, v_ptr, start, page, num_keys, first_key, kv_head,
        stride_k_page, stride_k_token, stride_v_page, stride_v_token, stride_v_d,
        N, HEAD_SIZE, BLOCK_D, KV_HEADS, PAGE_SIZE, V_TURNED, TMA, MASKED,
    )  # fmt: skip
    v_ND = as_operand(v_ND, V_OPERAND)
    if TMA and MASKED:  # what lies past the sequence may be NaN
        v_ND = tl.where((key_N < num_keys)[:, None], v_ND, 0.0)
    v_scale_1N = score_scale
    if K_MODE == 2:
        k_scale_1N = _load_scales(
            k_scale_ptr, start, page, num_keys, first_key, first_scale, kv_head, stride_scale_page,
            stride_scale_head, stride_scale_token, N, KV_HEADS, PAGE_SIZE, TMA, MASKED,
        )  # fmt: skip
    s_RN = tl.dot(q_RD, tl.trans(as_operand(k_ND, q_RD.dtype)))
    s_RN = s_RN * (k_scale_1N * score_scale) if K_MODE == 2 else s_RN * score_scale
    if MASKED:
        s_RN = tl.where(position_R[:, None] >= key_N[None, :], s_RN, float("-inf"))
    if WINDOW > 0:
        s_RN = tl.where(position_R[:, None] < key_N[None, :] + WINDOW, s_RN, float("-inf"))
    if start % CHUNK == 0 and start > 0:
        m_R, l_R, o_RD = merge_rows(m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD, ROWS)
        m_chunk_R = tl.full([ROWS], LOWEST, tl.float32)
    if V_MODE == 2:
        v_scale_1N = _load_scales(
            v_scale_ptr, start, page, num_keys, first_key, first_scale, kv_head, stride_scale_page,
            stride_scale_head, stride_scale_token, N, KV_HEADS, PAGE_SIZE, TMA, MASKED,
        )  # fmt: skip
    m_chunk_R, l_chunk_RX, o_chunk_RD = update_rows(
        s_RN, m_chunk_R, l_chunk_RX, o_chunk_RD, v_ND, v_scale_1N, ROWS, V_MODE
    )
    return m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD


@triton.jit(do_not_specialize=["stride_table"])
def _attention_rows_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse2_ptr, table_ptr, cu_seqlens_ptr, contexts_ptr, k_scale_ptr, v_scale_ptr,
    stride_q_token, stride_q_head, stride_k_page, stride_k_head, stride_k_token, stride_v_page, stride_v_head,
    stride_v_token, stride_v_d, stride_scale_page, stride_scale_head, stride_scale_token, stride_table, base_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr,
    K_OPERAND: tl.constexpr, V_OPERAND: tl.constexpr, TMA: tl.constexpr, V_TURNED: tl.constexpr,
    STORE_LSE: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, sink_ptr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows start first
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
        if K_MODE == 1:  # through this program's own memory, so that wgmma reads q from shared memory
            own_ptr = (out_ptr + (token_R[:, None] * HEADS + head) * HEAD_SIZE + d_D[None, :]).to(
                tl.pointer_type(K_OPERAND), bitcast=True
            )
            tl.store(own_ptr, q_RD, mask=inside_RD)
            tl.debug_barrier()
            q_RD = tl.load(own_ptr, mask=inside_RD, other=0.0)
        score_scale = base_scale
        out_scale = 1.0
        if K_MODE == 1:
            score_scale = base_scale * tl.load(k_scale_ptr + kv_head)
        if V_MODE == 1:
            out_scale = tl.load(v_scale_ptr + kv_head)
        if not TMA:
            if PAGE_SIZE > 0 and not V_TURNED:  # K and V share their offsets; otherwise registers spill
                stride_v_page = stride_k_page
                stride_v_head = stride_k_head
                stride_v_token = stride_k_token
            k_ptr += kv_head * stride_k_head
            v_ptr += kv_head * stride_v_head
        first_scale = first_column(first_query, sequence)
        if PAGE_SIZE > 0:
            table_ptr += sequence.to(tl.int64) * stride_table

        m_R = tl.full([ROWS], LOWEST, tl.float32)
        l_R = tl.zeros([ROWS], tl.float32)
        if sink_ptr is not None:
            m_R = tl.zeros([ROWS], tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * SINK_SCALE
            l_R = tl.full([ROWS], 1.0, tl.float32)
        o_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
        m_chunk_R = tl.full([ROWS], LOWEST, tl.float32)
        l_chunk_RX = tl.zeros([ROWS, CLASSES], tl.float32)
        o_chunk_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
        unmasked_end = (before + 1) // N * N
        end = tl.minimum(num_keys, before + ROWS)
        begin = tl.maximum(before + 1 - WINDOW, 0) // N * N if WINDOW > 0 else 0  # the first tile that a row reads
        page = first_query if PAGE_SIZE == 0 else load_pages(table_ptr, begin, num_keys, PAGE_SIZE, N)
        for start in tl.range(begin, unmasked_end, N, num_stages=STAGES):
            here = page
            if PAGE_SIZE > 0:
                page = load_pages(table_ptr, start + N, num_keys, PAGE_SIZE, N)
            m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD = _rows_tile(
                q_RD, m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD, start, here, position_R, num_keys,
                first_query, kv_head, k_ptr, v_ptr, stride_k_page, stride_k_token, stride_v_page, stride_v_token,
                stride_v_d, k_scale_ptr, v_scale_ptr, first_scale, stride_scale_page, stride_scale_head,
                stride_scale_token, score_scale, ROWS, N, CHUNK, HEAD_SIZE, BLOCK_D, KV_HEADS, PAGE_SIZE, K_MODE,
                V_MODE, V_OPERAND, V_TURNED, TMA, False, WINDOW,
            )  # fmt: skip
        for start in tl.range(unmasked_end, end, N, num_stages=1):
            here = page
            if PAGE_SIZE > 0:
                page = load_pages(table_ptr, start + N, num_keys, PAGE_SIZE, N)
            m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD = _rows_tile(
                q_RD, m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD, start, here, position_R, num_keys,
                first_query, kv_head, k_ptr, v_ptr, stride_k_page, stride_k_token, stride_v_page, stride_v_token,
                stride_v_d, k_scale_ptr, v_scale_ptr, first_scale, stride_scale_page, stride_scale_head,
                stride_scale_token, score_scale, ROWS, N, CHUNK, HEAD_SIZE, BLOCK_D, KV_HEADS, PAGE_SIZE, K_MODE,
                V_MODE, V_OPERAND, V_TURNED, TMA, True, WINDOW,
            )  # fmt: skip
        m_R, l_R, o_RD = merge_rows(m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD, ROWS)

        l_safe_R = tl.where(num_keys > 0, l_R, 1.0)  # a padding sequence gives zeros; NaN stays NaN
        out_RD = o_RD * tl.div_rn(tl.zeros_like(l_R) + out_scale, l_safe_R)[:, None]
        out_offset_RD = (token_R[:, None] * HEADS + head) * HEAD_SIZE + d_D[None, :]
        tl.store(out_ptr + out_offset_RD, out_RD.to(out_ptr.dtype.element_ty), mask=inside_RD)
        if STORE_LSE:
            tl.store(lse2_ptr + token_R * HEADS + head, m_R + tl.log2(l_R), mask=row_R < num_queries)


def _strides(x: Tensor, paged: bool) -> tuple[int, int, int]:
    """Strides of a page (0 if packed), of a kv head and of a token."""
    return (x.stride(0), x.stride(1), x.stride(2)) if paged else (0, x.stride(1), x.stride(0))


def _tables(
    k: Tensor, v: Tensor, turned: bool, paged: bool
) -> tuple[bool, tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]]:
    """K and V as the kernel reads them: through TMA descriptors where both can be, else as they are."""
    if paged:
        caches = k, v.mT if turned else v
        tma = comes_by_tma(*caches)
        return tma, (rows_of_tiles(caches[0]), rows_of_tiles(caches[1])) if tma else (k, v)
    tma = k.shape[2] in TMA_HEAD_SIZES and _addressable(k) and _addressable(v)
    return tma, (_rows_of_tokens(k), _rows_of_tokens(v)) if tma else (k, v)


def _addressable(x_TKD: Tensor) -> bool:
    """Whether TMA can load tokens of one head: heads lie side by side, tokens at multiples of 16 bytes."""
    aligned = x_TKD.stride(0) * x_TKD.element_size() % 16 == 0 and x_TKD.data_ptr() % 16 == 0
    return aligned and x_TKD.stride()[1:] == (x_TKD.shape[2], 1)


def _rows_of_tokens(x_TKD: Tensor) -> TensorDescriptor:
    """Packed K or V as [T, K * D], loaded by tiles of one head."""
    T, K, D = x_TKD.shape
    return TensorDescriptor(x_TKD, [T, K * D], [x_TKD.stride(0), 1], [KV_TILE, D])


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
    window: int | None = None,
    gluon: bool = True,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch for packed K and V [T, K, D] or, with a block table, for pages [num_pages, K, page_size, D].

    K and V each have no scales, [K] for `calibrated`, or for `dynamic` [T, K] or [num_pages, K, page_size]. K's last
    axis is contiguous. Pages of V have the layout of K's, or the transposed one (`kv_store.by_key`). `gluon`: whether
    Gluon may run; no bit depends on it. `sinks_H`: each head's sink. Returns out [T, H, D], zero outside every
    sequence, and for packed input lse2 [T, H].
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
    rows, warps, stages = (64, 8, 1) if head_size > 128 else (128, 8, 3)
    grid = (triton.cdiv(max_query_len, rows), num_heads, cu_seqlens_B1.shape[0] - 1)
    if num_tokens == 0 or 0 in grid:
        return out_THD, lse2_TH
    tma, tables = _tables(k, v, turned, paged)
    gluon &= is_code(v.dtype) or not is_code(k.dtype)  # its feeder of both would convert K, with too few registers
    gluon &= window is None and sinks_H is None
    if gluon and tma and head_size == GLUON_HEAD_SIZE and q_THD.dtype == torch.bfloat16:
        operands = (q_THD, k, v.mT if turned else v, cu_seqlens_B1, max_query_len, softmax_scale, k_scale, v_scale)
        if _run_gluon(*operands, block_table_BP, context_lens_B, stride_scale[:0:-1], out_THD, lse2_TH):
            return out_THD, lse2_TH
    scales: tuple[ScaleTable, ScaleTable] = (k_scale, v_scale)
    if tma:
        rows_of_scales = (k_scale, v_scale) if paged else align_scales(k_scale, v_scale, cu_seqlens_B1, max_query_len)
        scales = scale_table(rows_of_scales[0], KV_TILE), scale_table(rows_of_scales[1], KV_TILE)
    _attention_rows_kernel[grid](
        q_THD, *tables, out_THD, lse2_TH, block_table_BP, cu_seqlens_B1, context_lens_B, *scales,
        q_THD.stride(0), q_THD.stride(1), *strides, *stride_scale,
        block_table_BP.stride(0) if block_table_BP is not None else 0, softmax_scale * LOG2E,
        HEADS=num_heads, GROUP=num_heads // k.shape[1], HEAD_SIZE=head_size, BLOCK_D=block_of_head(head_size),
        PAGE_SIZE=page_size, ROWS=rows, N=KV_TILE, CHUNK=KV_CHUNK,
        K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode],
        K_OPERAND=TRITON_DTYPE[operand_dtype(k.dtype, k_mode)], V_OPERAND=TRITON_DTYPE[operand_dtype(v.dtype, v_mode)],
        TMA=tma, V_TURNED=turned, STORE_LSE=not paged, STAGES=stages, WINDOW=window or 0,
        sink_ptr=sinks_H, num_warps=warps,
        **({"enable_fp_fusion": False} if q_THD.is_cuda else {}),
    )  # fmt: skip
    return out_THD, lse2_TH


def attention_packed_forward_triton(
    q_THD: Tensor,
    kv: ReplayedKV,
    cu_seqlens_B1: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward of `attention_packed`."""
    out_THD, lse2_TH = attention_rows(
        q_THD, kv.k_TKD, kv.v_TKD, cu_seqlens_B1, max_seqlen, softmax_scale, kv.k_scale, kv.v_scale,
        window=window, sinks_H=sinks_H,
    )  # fmt: skip
    assert lse2_TH is not None
    return out_THD, lse2_TH


def _run_gluon(q_THD: Tensor, k: Tensor, v: Tensor, *others: Any) -> bool:
    """Whether it ran."""
    if not can_run("attention_rows_gluon", k, v):
        return False
    try:
        from octetrl.kernels.attention.attention_rows_gluon import attention_rows_gluon

        attention_rows_gluon(q_THD, k, v, *others)
    except COMPILER_ERRORS as error:
        give_up("attention_rows_gluon", error)
        return False
    return True
