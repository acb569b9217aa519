"""Causal attention of new tokens over a paged KV cache: decode and chunked prefill, with one order of sums.

Sequence b has the queries `cu_seqlens_q[b] : cu_seqlens_q[b + 1]`; the last one sits at key `context_lens[b]
- 1`, and the keys of this very chunk are read from the cache too, so a prompt token meets the same quantised
K and V at prefill as at decode.

Decode has one program per sequence and kv head, with 128 keys on the tensor core's long side and that head's query
heads, padded to 16 columns, on the short one: 16 columns and 4 warps make it wgmma. With 8 the codes would go through
mma.sync, for which Triton permutes K inside a pair of instructions, and the sums would come out in another order.
There is no split of long contexts: at rollout's batch sizes the programs fill the GPU without it (an H200, 128 x 2,560
FP8 keys: 159 us a layer, 160-162 with splits), and a split would be one more order to keep. Prefill is
`attention_rows`.

B sequences, P pages of the longest block table, T tokens, H query heads, K kv heads, D head size, S keys,
N keys of a tile, C query columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.attention_order import (
    KV_TILE,
    LOG2E,
    MODE_NUMBER,
    SUPPORTED_HEAD_SIZES,
    TRITON_DTYPE,
    KVRows,
    Piece,
    attend_reference,
    load_pages,
    mode_of,
    operand_dtype,
    update_columns,
)
from octetrl.kernels.attention_rows import SMALLEST_BLOCK_D, attention_rows
from octetrl.kernels.kv_store import scale_in_use

DECODE_COLUMNS = 16


def attention_paged(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """out [T, H, D] in q's dtype.

    k_cache, v_cache: [num_pages, K, page_size, D], each BF16, E4M3 or (CPU) float32. block_table_BP: int32, -1
    padded. cu_seqlens_q_B1, context_lens_B: int32; a context of 0 marks a padding sequence, whose rows come
    back as zeros. Scales as in `kv_store`. max_query_len: longest query run, 1 for pure decode; without it T
    - B + 1 is assumed.
    """
    scales = (k_scale_K, v_scale_K, k_token_scale, v_token_scale)
    arguments = (
        q_THD,
        k_cache,
        v_cache,
        block_table_BP,
        cu_seqlens_q_B1,
        context_lens_B,
        softmax_scale,
        *scales,
    )
    if q_THD.is_cuda:
        return attention_paged_triton(*arguments, max_query_len)
    return attention_paged_reference(*arguments)


def attention_paged_reference(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
) -> Tensor:
    """`attention_paged` in plain torch, by the CPU form of the order."""
    _, num_kv_heads, page_size, head_size = k_cache.shape
    kv = KVRows(
        k_cache.view(-1, head_size),
        v_cache.view(-1, head_size),
        scale_in_use(k_cache, k_scale_K, k_token_scale),
        scale_in_use(v_cache, v_scale_K, v_token_scale),
    )

    def rows_of(piece: Piece) -> Tensor:
        page_JS = block_table_BP[piece.sequence_J[:, None], piece.key_JS // page_size].long()
        head_K = torch.arange(num_kv_heads)[:, None]
        return (page_JS[:, None] * num_kv_heads + head_K) * page_size + (piece.key_JS % page_size)[:, None]

    out_THD, _ = attend_reference(
        q_THD,
        kv,
        rows_of,
        tuple(cu_seqlens_q_B1.tolist()),
        tuple(context_lens_B.tolist()),
        softmax_scale,
        num_kv_heads,
    )
    return out_THD


# ---------------------------------------------------------------- Triton


@triton.jit(do_not_specialize=["stride_table"])
def _attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, contexts_ptr, k_scale_ptr, v_scale_ptr,
    stride_q_token, stride_q_head, stride_page, stride_head, stride_token, stride_scale_page, stride_scale_head,
    stride_scale_token, stride_table, base_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, N: tl.constexpr, K_MODE: tl.constexpr, V_MODE: tl.constexpr, K_OPERAND: tl.constexpr,
    V_OPERAND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_keys = tl.load(contexts_ptr + sequence)
    d_D = tl.arange(0, BLOCK_D)
    n_N = tl.arange(0, N)
    column_C = tl.arange(0, COLUMNS)
    head_C = kv_head * GROUP + column_C % GROUP
    head_D = d_D < HEAD_SIZE
    q_DC = tl.load(
        q_ptr + sequence * stride_q_token + head_C[None, :] * stride_q_head + d_D[:, None],
        mask=head_D[:, None], other=0.0,
    ).to(K_OPERAND)  # fmt: skip
    score_scale = base_scale
    out_scale = 1.0
    if K_MODE == 1:
        score_scale = base_scale * tl.load(k_scale_ptr + kv_head)
    if V_MODE == 1:
        out_scale = tl.load(v_scale_ptr + kv_head)
    table_ptr += sequence * stride_table

    m_C = tl.full([COLUMNS], float("-inf"), tl.float32)
    l_C = tl.zeros([COLUMNS], tl.float32)
    o_DC = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    page = load_pages(table_ptr, 0, num_keys, PAGE_SIZE, N)
    for start in tl.range(0, num_keys, N, num_stages=STAGES):
        key_N = start + n_N
        present_N = key_N < num_keys
        row_N = page.to(tl.int64) * stride_page + kv_head * stride_head + (key_N % PAGE_SIZE) * stride_token
        scale_N = page.to(tl.int64) * stride_scale_page + (key_N % PAGE_SIZE) * stride_scale_token
        page = load_pages(table_ptr, start + N, num_keys, PAGE_SIZE, N)
        k_mask_ND = present_N[:, None] & head_D[None, :]
        v_mask_DN = head_D[:, None] & present_N[None, :]
        k_ND = tl.load(k_ptr + row_N[:, None] + d_D[None, :], mask=k_mask_ND, other=0.0).to(K_OPERAND)
        v_scale_N = score_scale
        scale_N += kv_head * stride_scale_head
        if K_MODE == 2:
            k_scale_N = tl.load(k_scale_ptr + scale_N, mask=present_N, other=0.0)
        if V_MODE == 2:
            v_scale_N = tl.load(v_scale_ptr + scale_N, mask=present_N, other=0.0)
        s_NC = tl.dot(k_ND, q_DC)
        s_NC = s_NC * (k_scale_N * score_scale)[:, None] if K_MODE == 2 else s_NC * score_scale
        s_NC = tl.where(present_N[:, None], s_NC, float("-inf"))
        v_DN = tl.load(v_ptr + row_N[None, :] + d_D[:, None], mask=v_mask_DN, other=0.0).to(V_OPERAND)
        m_C, l_C, o_DC = update_columns(s_NC, m_C, l_C, o_DC, v_DN, v_scale_N, COLUMNS, N, V_MODE)

    l_safe_C = tl.where(num_keys > 0, l_C, 1.0)  # a padding sequence gives zeros; NaN stays NaN
    out_DC = o_DC * tl.div_rn(tl.zeros_like(l_C) + out_scale, l_safe_C)[None, :]
    out_offset_DC = (sequence * HEADS + head_C)[None, :] * HEAD_SIZE + d_D[:, None]
    own_DC = (column_C < GROUP)[None, :] & head_D[:, None]
    tl.store(out_ptr + out_offset_DC, out_DC.to(out_ptr.dtype.element_ty), mask=own_DC)


def attention_paged_triton(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    k_scale_K: Tensor | None = None,
    v_scale_K: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """`attention_paged` by the decode kernel where every sequence has one query, else by the rows kernel."""
    _, num_kv_heads, page_size, head_size = k_cache.shape
    assert KV_TILE % page_size == 0 or page_size % KV_TILE == 0, f"page size {page_size} does not fit the KV tile"
    assert block_table_BP.stride(1) == 1, "attention_paged: rows of the block table must be contiguous"
    assert k_cache.stride() == v_cache.stride(), "attention_paged: K and V caches must have one layout"
    k_scale = scale_in_use(k_cache, k_scale_K, k_token_scale)
    v_scale = scale_in_use(v_cache, v_scale_K, v_token_scale)
    if max_query_len != 1:
        longest = q_THD.shape[0] if max_query_len is None else max_query_len
        out_THD, _ = attention_rows(
            q_THD, k_cache, v_cache, cu_seqlens_q_B1, longest, softmax_scale, k_scale, v_scale,
            block_table_BP, context_lens_B,
        )  # fmt: skip
        return out_THD
    num_sequences, num_heads = q_THD.shape[0], q_THD.shape[1]
    assert num_sequences == context_lens_B.shape[0], "decode takes exactly one query a sequence"
    assert head_size in SUPPORTED_HEAD_SIZES, f"head size {head_size} is not one of {SUPPORTED_HEAD_SIZES}"
    assert q_THD.stride(2) == k_cache.stride(3) == 1, "attention_paged: the last axis must be contiguous"
    group = num_heads // num_kv_heads
    stages = max(1, (3 if k_cache.element_size() == 1 else 2) - (head_size == 256))  # what shared memory holds
    k_mode, v_mode = mode_of(k_scale), mode_of(v_scale)
    token_scales = [scale for scale in (k_scale, v_scale) if mode_of(scale) == "dynamic" and scale is not None]
    stride_scale = token_scales[0].stride() if token_scales else (0, 0, 0)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_sequences == 0:
        return out_THD
    _attention_decode_kernel[(num_sequences, num_kv_heads)](
        q_THD, k_cache, v_cache, out_THD, block_table_BP, context_lens_B, k_scale, v_scale,
        q_THD.stride(0), q_THD.stride(1), *k_cache.stride()[:3], *stride_scale, block_table_BP.stride(0),
        softmax_scale * LOG2E, HEADS=num_heads, GROUP=group, HEAD_SIZE=head_size,
        BLOCK_D=max(SMALLEST_BLOCK_D, head_size), PAGE_SIZE=page_size,
        COLUMNS=max(DECODE_COLUMNS, triton.next_power_of_2(group)), N=KV_TILE,
        K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode],
        K_OPERAND=TRITON_DTYPE[operand_dtype(k_cache.dtype, k_mode)],
        V_OPERAND=TRITON_DTYPE[operand_dtype(v_cache.dtype, v_mode)], STAGES=stages, num_warps=4,
        **({"enable_fp_fusion": False} if q_THD.is_cuda else {}),
    )  # fmt: skip
    return out_THD
