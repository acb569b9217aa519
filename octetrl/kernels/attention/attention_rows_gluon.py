"""Attention of blocks of query rows in Gluon, for heads of 128 elements: prefill and the training forward on Hopper.

`attention_rows.py` calls this, and `attention_order.py` has the formula and the order of sums. The bits are those of
the Triton kernel. There all warps load, convert and multiply in step, so the tensor cores wait meanwhile. Here
warpgroups work beside one another:

    two consumers    64 query rows each: scores, softmax, and the sum over V
    a feeder         loads tiles of K and V by TMA, and the scales of tokens (attention_feed_gluon.py)
    two feeders      if V comes as codes: one for K, one for V; they convert the codes too

Feeders fill rings of `STAGES` tiles in the operand dtype. `full` and `empty` are a ring's barriers, and each turn of a
ring flips their phase. Pages of codes arrive in rings of their own, `AHEAD` tiles early. The feeder multiplies K's
scales of tokens by the scores' factor, once for all rows. A consumer waits for its own products at the end of a tile,
because ptxas would serialise wgmma that are in flight across a loop. A thread has whole classes of the row sums, in the
layout in which they arise, so nothing is exchanged between threads.

R query rows of a consumer, N keys of a tile, X classes, D head size. Written for Gluon of Triton 3.6.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octetrl.fp8.format import is_code
from octetrl.kernels.attention.attention_feed_gluon import (
    ROWS,
    WIDE,
    WORDS,
    D,
    N,
    conversion,
    feed,
    tile_descriptor,
    tiles_of,
)
from octetrl.kernels.attention.attention_order import (
    FLOOR,
    KV_CHUNK,
    LOG2E,
    MODE_NUMBER,
    mode_of,
    operand_dtype,
)
from octetrl.kernels.gluon_compat import thread_barrier

LOWEST = gl.constexpr(FLOOR)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
QUERY_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
SCALES_LAYOUT = gl.constexpr(gl.SharedLinearLayout([[1], [8], [2], [4], [16], [32], [64]]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
GLUON_DTYPE = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
STAGES, AHEAD = 2, 2  # tiles of a ring
REGISTERS = (240, 24), (224, 32)  # of a thread of consumers and feeders: without and with codes


@gluon.jit
def _classes(p_RN):
    """`_classes_of_rows`: sums of 128 columns over bits 6, 3 and 0 of the column number."""
    p = gl.sum(gl.reshape(p_RN, [ROWS, 2, 64]), 1)
    p = gl.sum(gl.reshape(p, [ROWS, 4, 2, 8]), 2)
    return gl.sum(gl.reshape(p, [ROWS, 16, 2]), 2)


@gluon.jit
def _total(l_RX):
    """`total_of_rows`: neighbours first, then pairs of pairs."""
    l_RX = gl.sum(gl.reshape(l_RX, [ROWS, 8, 2]), 2)
    l_RX = gl.sum(gl.reshape(l_RX, [ROWS, 4, 2]), 2)
    l_RX = gl.sum(gl.reshape(l_RX, [ROWS, 2, 2]), 2)
    return gl.sum(l_RX, 1)


@gluon.jit
def _merge(m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD):
    """`merge_rows`."""
    m_new_R = gl.maximum(m_R, m_chunk_R)
    before_R = gl.exp2(m_R - m_new_R)
    here_R = gl.exp2(m_chunk_R - m_new_R)
    l_R = gl.fma(gl.convert_layout(_total(l_chunk_RX), gl.SliceLayout(1, MMA)), here_R, l_R * before_R)
    here_RD, _ = gl.broadcast(gl.expand_dims(here_R, 1), o_RD)
    o_RD = gl.fma(o_chunk_RD, here_RD, o_RD * gl.expand_dims(before_R, 1))
    return m_new_R, l_R, o_RD


@gluon.jit
def _clear_keys(v_ND, left):
    """Set V's rows from `left` on to 0. Both consumers do so, with the same bytes."""
    for part in gl.static_range(8):
        rows = v_ND.slice(part * 16, 16, 0)
        key = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, QUERY_LAYOUT))
        rows.store(gl.where(gl.expand_dims(key < left, 1), rows.load(QUERY_LAYOUT), 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _consume_tile(
    state, q_RD, rings, tile, position_R, num_keys, score_scale,
    K_MODE: gl.constexpr, V_MODE: gl.constexpr, V_OPERAND: gl.constexpr, V_CODES: gl.constexpr,
    STAGES: gl.constexpr, CHUNK: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One tile, as `_rows_tile`."""
    m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD = state
    k_ring, v_ring, k_scale_ring, v_scale_ring, k_full, v_full, k_empty, v_empty = rings
    stage, phase, start = tile % STAGES, tile // STAGES & 1, tile * N
    key_N = start + gl.arange(0, N, gl.SliceLayout(0, MMA))
    mbarrier.wait(k_full.index(stage), phase)
    zero = gl.zeros([ROWS, N], gl.float32, MMA)
    s_RN = warpgroup_mma(q_RD, k_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    factor = score_scale
    if K_MODE == 2:
        factor = gl.expand_dims(k_scale_ring.index(stage).load(gl.SliceLayout(0, MMA)), 0)
    s_RN = warpgroup_mma_wait(0, deps=[s_RN])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s_RN = s_RN * factor
    if MASKED:
        s_RN = gl.where(gl.expand_dims(position_R, 1) >= gl.expand_dims(key_N, 0), s_RN, float("-inf"))
    if start % CHUNK == 0 and start > 0:
        m_R, l_R, o_RD = _merge(m_R, l_R, o_RD, m_chunk_R, l_chunk_RX, o_chunk_RD)
        m_chunk_R = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    m_new_R = gl.maximum(m_chunk_R, gl.max(s_RN, 1))
    alpha_R = gl.exp2(m_chunk_R - m_new_R)
    p_RN = gl.exp2(s_RN - gl.expand_dims(m_new_R, 1))
    sums_RX = _classes(p_RN)
    mbarrier.wait(v_full.index(stage), phase)
    if V_MODE == 2:
        p_RN = p_RN * gl.expand_dims(v_scale_ring.index(stage).load(gl.SliceLayout(0, MMA)), 0)
    v_ND = v_ring.index(stage)
    if MASKED and not V_CODES:  # noqa: SIM102 (the first is known to the compiler)
        if start + N > num_keys:  # what lies past the sequence may be NaN
            _clear_keys(v_ND, num_keys - start)
    o_chunk_RD = o_chunk_RD * gl.expand_dims(alpha_R, 1)
    p_operand_RN = gl.convert_layout(p_RN.to(V_OPERAND), gl.DotOperandLayout(0, MMA, 2))
    o_chunk_RD = warpgroup_mma(p_operand_RN, v_ND.permute((1, 0)) if V_CODES else v_ND, o_chunk_RD, is_async=True)
    CLASSES: gl.constexpr = l_chunk_RX.type.layout
    alpha_of_classes_R = gl.convert_layout(alpha_R, gl.SliceLayout(1, CLASSES))
    l_chunk_RX = l_chunk_RX * gl.expand_dims(alpha_of_classes_R, 1) + gl.convert_layout(sums_RX, CLASSES)
    o_chunk_RD = warpgroup_mma_wait(0, deps=[o_chunk_RD])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return m_R, l_R, o_RD, m_new_R, l_chunk_RX, o_chunk_RD


@gluon.jit
def _consume(
    pointers, strides, q_ring, rings, sizes, base_scale, CONSUMER: gl.constexpr, HEADS: gl.constexpr,
    GROUP: gl.constexpr, K_MODE: gl.constexpr, V_MODE: gl.constexpr, K_OPERAND: gl.constexpr, V_OPERAND: gl.constexpr,
    V_CODES: gl.constexpr, STORE_LSE: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """The warpgroup for rows CONSUMER * 64 to CONSUMER * 64 + 63 of the program."""
    q_ptr, out_ptr, lse2_ptr, k_scale_ptr, v_scale_ptr = pointers
    head, _, first, num_queries, num_keys, block = sizes
    first_row = block * (2 * ROWS) + CONSUMER * ROWS
    q_operand_RD = q_ring.index(CONSUMER)
    row_Q = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, QUERY_LAYOUT))
    d_Q = gl.arange(0, D, gl.SliceLayout(0, QUERY_LAYOUT))
    q_ptrs = q_ptr + gl.expand_dims((first + row_Q).to(gl.int64) * strides[0] + head * strides[1], 1)
    q_RD = gl.load(q_ptrs + gl.expand_dims(d_Q, 0), mask=gl.expand_dims(row_Q < num_queries, 1), other=0.0)
    q_operand_RD.store(q_RD.to(K_OPERAND))
    fence_async_shared()
    thread_barrier()
    score_scale = base_scale
    out_scale = 1.0
    if K_MODE == 1:
        score_scale = base_scale * gl.load(k_scale_ptr + head // GROUP)
    if V_MODE == 1:
        out_scale = gl.load(v_scale_ptr + head // GROUP)
    row_R = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    position_R = num_keys - num_queries + row_R
    m_R = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
    l_R = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MMA))
    o_RD = gl.zeros([ROWS, D], gl.float32, MMA)
    state = (m_R, l_R, o_RD, m_R, _classes(gl.zeros([ROWS, N], gl.float32, MMA)), o_RD)
    masked, end = tiles_of(sizes)
    for tile in range(0, masked):
        state = _consume_tile(
            state, q_operand_RD, rings, tile, position_R, num_keys, score_scale,
            K_MODE, V_MODE, V_OPERAND, V_CODES, STAGES, CHUNK, False,
        )  # fmt: skip
    for tile in range(masked, end):
        state = _consume_tile(
            state, q_operand_RD, rings, tile, position_R, num_keys, score_scale,
            K_MODE, V_MODE, V_OPERAND, V_CODES, STAGES, CHUNK, True,
        )  # fmt: skip
    m_R, l_R, o_RD = _merge(state[0], state[1], state[2], state[3], state[4], state[5])
    l_safe_R = gl.where(num_keys > 0, l_R, 1.0)  # a padding sequence gives zeros; NaN stays NaN
    o_RD = o_RD * gl.expand_dims(gl.div_rn(gl.zeros_like(l_R) + out_scale, l_safe_R), 1)
    d_D = gl.arange(0, D, gl.SliceLayout(0, MMA))
    token_R = (first + row_R).to(gl.int64)
    out_ptrs = out_ptr + gl.expand_dims((token_R * HEADS + head) * D, 1) + gl.expand_dims(d_D, 0)
    gl.store(out_ptrs, o_RD.to(gl.bfloat16), mask=gl.expand_dims(row_R < num_queries, 1))
    if STORE_LSE:
        gl.store(lse2_ptr + token_R * HEADS + head, m_R + gl.log2(l_R), mask=row_R < num_queries)


@gluon.jit(do_not_specialize=["stride_table"])
def _attention_rows_gluon_kernel(
    q_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, out_ptr, lse2_ptr, table_ptr, cu_seqlens_ptr, contexts_ptr,
    stride_q_token, stride_q_head, stride_table, stride_scale_token, stride_scale_head, base_scale,
    HEADS: gl.constexpr, GROUP: gl.constexpr, K_MODE: gl.constexpr, V_MODE: gl.constexpr, K_OPERAND: gl.constexpr,
    V_OPERAND: gl.constexpr, K_WAY: gl.constexpr, V_WAY: gl.constexpr, PAGED: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, FEEDER_REGISTERS: gl.constexpr,
):  # fmt: skip
    block = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest rows start first
    sequence = gl.program_id(2)
    first = gl.load(cu_seqlens_ptr + sequence)
    num_queries = gl.load(cu_seqlens_ptr + sequence + 1) - first
    num_keys = num_queries
    if PAGED:
        num_keys = gl.load(contexts_ptr + sequence)
    q_ring = gl.allocate_shared_memory(K_OPERAND, [2, ROWS, D], WIDE)
    k_ring = gl.allocate_shared_memory(K_OPERAND, [STAGES, N, D], WIDE)
    v_ring = gl.allocate_shared_memory(V_OPERAND, [STAGES, N, D], WIDE)
    k_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, N], SCALES_LAYOUT)
    v_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, N], SCALES_LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):  # TMA arrives at `full`, and so does a feeder that has stored something
        mbarrier.init(k_full.index(i), count=2 if K_WAY is None and K_MODE == 2 else 1)
        mbarrier.init(v_full.index(i), count=2 if V_WAY is None and V_MODE == 2 else 1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    rings = (k_ring, v_ring, k_scale_ring, v_scale_ring, k_full, v_full, k_empty, v_empty)
    k_words, v_words = k_ring, v_ring
    k_codes, v_codes, k_ready, v_ready = k_ring, v_ring, k_full, v_full  # unused without codes
    if K_WAY is not None:
        k_words = k_ring._reinterpret(gl.int32, [STAGES, N, D // 2], WORDS)
        k_codes = gl.allocate_shared_memory(gl.int32, [AHEAD, 128, 32], WORDS)
        k_ready = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
        for i in gl.static_range(AHEAD):
            mbarrier.init(k_ready.index(i), count=1)
    if V_WAY is not None:
        v_words = v_ring._reinterpret(gl.int32, [STAGES, D, N // 2], WORDS)
        v_codes = gl.allocate_shared_memory(gl.int32, [AHEAD, 128, 32], WORDS)
        v_ready = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
        for i in gl.static_range(AHEAD):
            mbarrier.init(v_ready.index(i), count=1)
    words = (k_words, v_words)
    codes = (k_codes, v_codes, k_ready, v_ready)
    sizes = (gl.program_id(1), sequence, first, num_queries, num_keys, block)
    pointers = (q_ptr, out_ptr, lse2_ptr, k_scale_ptr, v_scale_ptr)
    q_strides = (stride_q_token, stride_q_head)
    strides = (stride_table, stride_scale_token, stride_scale_head)
    descs, scale_ptrs = (k_desc, v_desc), (k_scale_ptr, v_scale_ptr)
    V_CODES: gl.constexpr = V_WAY is not None
    if V_CODES:
        gl.warp_specialize(
            [
                (_consume, (
                    pointers, q_strides, q_ring, rings, sizes, base_scale, gl.constexpr(0), HEADS, GROUP, K_MODE,
                    V_MODE, K_OPERAND, V_OPERAND, V_CODES, not PAGED, STAGES, CHUNK,
                )),
                (_consume, (
                    pointers, q_strides, q_ring, rings, sizes, base_scale, gl.constexpr(1), HEADS, GROUP, K_MODE,
                    V_MODE, K_OPERAND, V_OPERAND, V_CODES, not PAGED, STAGES, CHUNK,
                )),
                (feed, (
                    descs, scale_ptrs, table_ptr, strides, base_scale, rings, words, codes, sizes, GROUP,
                    HEADS // GROUP, K_MODE, V_MODE, K_WAY, V_WAY, gl.constexpr(True), gl.constexpr(False), PAGED,
                    STAGES, AHEAD,
                )),
                (feed, (
                    descs, scale_ptrs, table_ptr, strides, base_scale, rings, words, codes, sizes, GROUP,
                    HEADS // GROUP, K_MODE, V_MODE, K_WAY, V_WAY, gl.constexpr(False), gl.constexpr(True), PAGED,
                    STAGES, AHEAD,
                )),
            ],
            [4, 4, 4],
            [CONSUMER_REGISTERS, FEEDER_REGISTERS, FEEDER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    pointers, q_strides, q_ring, rings, sizes, base_scale, gl.constexpr(0), HEADS, GROUP, K_MODE,
                    V_MODE, K_OPERAND, V_OPERAND, V_CODES, not PAGED, STAGES, CHUNK,
                )),
                (_consume, (
                    pointers, q_strides, q_ring, rings, sizes, base_scale, gl.constexpr(1), HEADS, GROUP, K_MODE,
                    V_MODE, K_OPERAND, V_OPERAND, V_CODES, not PAGED, STAGES, CHUNK,
                )),
                (feed, (
                    descs, scale_ptrs, table_ptr, strides, base_scale, rings, words, codes, sizes, GROUP,
                    HEADS // GROUP, K_MODE, V_MODE, K_WAY, V_WAY, gl.constexpr(True), gl.constexpr(True), PAGED,
                    STAGES, AHEAD,
                )),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, FEEDER_REGISTERS],
        )  # fmt: skip


def attention_rows_gluon(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_B1: Tensor,
    max_query_len: int,
    softmax_scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_table_BP: Tensor | None,
    context_lens_B: Tensor | None,
    stride_scale: tuple[int, int],
    out_THD: Tensor,
    lse2_TH: Tensor | None,
    registers: tuple[int, int] | None = None,
) -> None:
    """`attention_rows` into `out_THD` and `lse2_TH`, for heads of 128 elements, packed or in pages of 128 keys.

    Pages of V in codes come as they lie, [num_pages, K, D, page_size]. `stride_scale`: of a token and of a head, for
    packed scales of tokens.
    """
    heads, kv_heads = q_THD.shape[1], k.shape[1]
    k_mode, v_mode = mode_of(k_scale), mode_of(v_scale)
    paged = block_table_BP is not None
    k_operand, v_operand = operand_dtype(k.dtype, k_mode), operand_dtype(v.dtype, v_mode)
    registers = REGISTERS[is_code(v.dtype)] if registers is None else registers
    _attention_rows_gluon_kernel[(triton.cdiv(max_query_len, 2 * ROWS.value), heads, cu_seqlens_B1.shape[0] - 1)](
        q_THD, tile_descriptor(k, paged), tile_descriptor(v, paged), k_scale, v_scale, out_THD, lse2_TH,
        block_table_BP, cu_seqlens_B1, context_lens_B, q_THD.stride(0), q_THD.stride(1),
        0 if block_table_BP is None else block_table_BP.stride(0), *stride_scale, softmax_scale * LOG2E,
        HEADS=heads, GROUP=heads // kv_heads, K_MODE=MODE_NUMBER[k_mode], V_MODE=MODE_NUMBER[v_mode],
        K_OPERAND=GLUON_DTYPE[k_operand], V_OPERAND=GLUON_DTYPE[v_operand], K_WAY=conversion(k, k_operand),
        V_WAY=conversion(v, v_operand), PAGED=paged, CHUNK=KV_CHUNK, STAGES=STAGES, AHEAD=AHEAD,
        CONSUMER_REGISTERS=registers[0], FEEDER_REGISTERS=registers[1], num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
