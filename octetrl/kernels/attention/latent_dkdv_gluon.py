"""dK and dV of latent attention in Gluon: the second kernel of `latent_backward_gluon.py`, which explains it.

Two consumers have 64 keys each and process the queries in tiles of I. The feeder also loads lse2 and delta of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from octetrl.kernels.attention.latent_tiles_gluon import (
    ALIGN,
    BARRIER,
    LINE,
    ROWS,
    WIDE,
    clear_tile,
    find_sequence,
    mma_layout,
    request,
    scores,
    store_rows,
)

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _dkdv_tile(
    state, k_tiles, q_tiles, row_tiles, full, empty, CONSUMER, turn, start, key_J, length, score_scale,
    NOPE: gl.constexpr, ROTARY: gl.constexpr, VALUE: gl.constexpr, BLOCK_I: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    dk_JN, dk_JR, dv_JV = state
    LAYOUT: gl.constexpr = mma_layout(BLOCK_I)
    stage, phase = turn % STAGES, turn // STAGES & 1
    mbarrier.wait(full.index(stage), phase)
    if MASKED:  # noqa: SIM102 (the first is known to the compiler)
        if start + BLOCK_I > length:
            clear_tile(q_tiles, stage, length - start, NOPE, ROTARY, VALUE, BLOCK_I)
    s_JI, dp_JI = scores(k_tiles, q_tiles, CONSUMER, stage, BLOCK_I)
    lse2_I = row_tiles[0].index(stage).load(gl.SliceLayout(0, LAYOUT))
    p_JI = gl.exp2(s_JI * score_scale - gl.expand_dims(lse2_I, 0))
    if MASKED:
        query_I = start + gl.arange(0, BLOCK_I, gl.SliceLayout(0, LAYOUT))
        seen = gl.expand_dims(query_I, 0) >= gl.expand_dims(key_J, 1)
        p_JI = gl.where(seen & gl.expand_dims(query_I < length, 0), p_JI, 0.0)
    p_operand = gl.convert_layout(p_JI.to(gl.bfloat16), gl.DotOperandLayout(0, mma_layout(VALUE), 2))
    dv_JV = warpgroup_mma(p_operand, q_tiles[2].index(stage), dv_JV, is_async=True)
    delta_I = row_tiles[1].index(stage).load(gl.SliceLayout(0, LAYOUT))
    dp_JI = warpgroup_mma_wait(1, deps=[dp_JI])
    ds_JI = (p_JI * (dp_JI - gl.expand_dims(delta_I, 0))).to(gl.bfloat16)
    ds_N = gl.convert_layout(ds_JI, gl.DotOperandLayout(0, mma_layout(NOPE), 2))
    ds_R = gl.convert_layout(ds_JI, gl.DotOperandLayout(0, mma_layout(ROTARY), 2))
    dk_JN = warpgroup_mma(ds_N, q_tiles[0].index(stage), dk_JN, is_async=True)
    dk_JR = warpgroup_mma(ds_R, q_tiles[1].index(stage), dk_JR, is_async=True)
    dk_JN, dk_JR, dv_JV = warpgroup_mma_wait(0, deps=[dk_JN, dk_JR, dv_JV])
    mbarrier.arrive(empty.index(stage), count=1)
    return dk_JN, dk_JR, dv_JV


@gluon.jit
def _query_tiles(length, first_key, BLOCK_I: gl.constexpr):
    """(number of tiles, those on the diagonal, whole ones after them); a last one follows if the sequence ends in it"""
    num_tiles = (length - first_key + BLOCK_I - 1) // BLOCK_I
    diagonal = gl.minimum(2 * ROWS // BLOCK_I, num_tiles)
    return num_tiles, diagonal, gl.maximum((length - first_key) // BLOCK_I - diagonal, 0)


@gluon.jit
def _query_start(first_key, turn, diagonal, whole, BLOCK_I: gl.constexpr):
    """Whole tiles come first, then the masked ones."""
    masked = turn - whole
    tile = gl.where(turn < whole, diagonal + turn, gl.where(masked < diagonal, masked, masked + whole))
    return first_key + tile * BLOCK_I


@gluon.jit
def _consume_queries(
    pointers, k_tiles, q_tiles, row_tiles, k_full, full, empty, sizes, score_scale, softmax_scale,
    CONSUMER: gl.constexpr, HEADS: gl.constexpr, NOPE: gl.constexpr, ROTARY: gl.constexpr, VALUE: gl.constexpr,
    BLOCK_I: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup for keys CONSUMER * 64 to CONSUMER * 64 + 63 of the program."""
    dkv_ptr, dkr_ptr = pointers
    head, sequence, num_sequences, first, length, first_key = sizes
    own = first_key + CONSUMER * ROWS
    key_J = own + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(BLOCK_I)))
    dk_JN = gl.zeros([ROWS, NOPE], gl.float32, mma_layout(NOPE))
    dk_JR = gl.zeros([ROWS, ROTARY], gl.float32, mma_layout(ROTARY))
    dv_JV = gl.zeros([ROWS, VALUE], gl.float32, mma_layout(VALUE))
    if (sequence < num_sequences) & (length > 0):
        num_tiles, diagonal, whole = _query_tiles(length, first_key, BLOCK_I)
        state = (dk_JN, dk_JR, dv_JV)
        mbarrier.wait(k_full, 0)
        for turn in range(0, whole):
            start = _query_start(first_key, turn, diagonal, whole, BLOCK_I)
            state = _dkdv_tile(
                state, k_tiles, q_tiles, row_tiles, full, empty, CONSUMER, turn, start, key_J, length, score_scale,
                NOPE, ROTARY, VALUE, BLOCK_I, STAGES, False,
            )  # fmt: skip
        for turn in range(whole, num_tiles):
            start = _query_start(first_key, turn, diagonal, whole, BLOCK_I)
            state = _dkdv_tile(
                state, k_tiles, q_tiles, row_tiles, full, empty, CONSUMER, turn, start, key_J, length, score_scale,
                NOPE, ROTARY, VALUE, BLOCK_I, STAGES, True,
            )  # fmt: skip
        dk_JN, dk_JR, dv_JV = state
    token_head = first.to(gl.int64) * HEADS + head
    SIZE: gl.constexpr = NOPE + VALUE
    ptr = dkv_ptr + token_head * SIZE
    row_N = own + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(NOPE)))
    row_R = own + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(ROTARY)))
    row_V = own + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(VALUE)))
    store_rows(ptr, dk_JN * softmax_scale, row_N, length, HEADS * SIZE, NOPE)
    store_rows(ptr + NOPE, dv_JV, row_V, length, HEADS * SIZE, VALUE)
    store_rows(dkr_ptr + token_head * ROTARY, dk_JR * softmax_scale, row_R, length, HEADS * ROTARY, ROTARY)


@gluon.jit
def _feed_queries(
    q_descs, k_descs, q_columns, k_columns, rows_ptr, stride_row, q_tiles, k_tiles, row_tiles, k_full, full, empty,
    sizes, HEADS: gl.constexpr, BLOCK_I: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    head, sequence, num_sequences, first, length, first_key = sizes
    if (sequence < num_sequences) & (length > 0):
        request(k_descs, k_columns, first + first_key, k_full, k_tiles, 0)
        request(k_descs, k_columns, first + first_key + ROWS, k_full, k_tiles, 1)
        num_tiles, diagonal, whole = _query_tiles(length, first_key, BLOCK_I)
        rows_ptr += head.to(gl.int64) * stride_row + (first // ALIGN + sequence) * ALIGN
        i_I = gl.arange(0, BLOCK_I, LINE)
        for turn in range(0, num_tiles):
            stage = turn % STAGES
            start = _query_start(first_key, turn, diagonal, whole, BLOCK_I)
            inside_I = start + i_I < length
            lse2_I = gl.load(rows_ptr + start + i_I, mask=inside_I, other=0.0)
            delta_I = gl.load(rows_ptr + stride_row.to(gl.int64) * HEADS + start + i_I, mask=inside_I, other=0.0)
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            request(q_descs, q_columns, first + start, full.index(stage), q_tiles, stage)
            row_tiles[0].index(stage).store(lse2_I)
            row_tiles[1].index(stage).store(delta_I)
            mbarrier.arrive(full.index(stage), count=1)


@gluon.jit(do_not_specialize=["num_sequences", "num_tokens", "stride_row"])
def _dkdv_gluon_kernel(
    qn_desc, qr_desc, dout_desc, kn_desc, kr_desc, v_desc, rows_ptr, dkv_ptr, dkr_ptr, cu_seqlens_ptr, score_scale,
    softmax_scale, num_sequences, num_tokens, stride_row, qn_head, qr_head, dout_head, kn_head, v_head,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROTARY: gl.constexpr, VALUE: gl.constexpr, BLOCK_I: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(0)
    sequence, first, length, number = find_sequence(
        gl.program_id(1), cu_seqlens_ptr, num_sequences, num_tokens, 2 * ROWS
    )
    first_key = number * (2 * ROWS)  # the first keys have the most queries: first
    length = gl.where(first_key < length, length, 0)  # a program without keys does nothing
    k_tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, NOPE], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, ROTARY], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, VALUE], WIDE),
    )
    q_tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_I, NOPE], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_I, ROTARY], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_I, VALUE], WIDE),
    )
    row_tiles = (
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_I], FLAT),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_I], FLAT),
    )
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(k_full, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # TMA, and the feeder that has stored lse2 and delta
        mbarrier.init(empty.index(i), count=2)
    sizes = (head, sequence, num_sequences, first, length, first_key)
    pointers = (dkv_ptr, dkr_ptr)
    q_descs, k_descs = (qn_desc, qr_desc, dout_desc), (kn_desc, kr_desc, v_desc)
    q_columns, k_columns = (head * qn_head, head * qr_head, head * dout_head), (head * kn_head, 0, head * v_head)
    gl.warp_specialize(
        [
            (_consume_queries, (
                pointers, k_tiles, q_tiles, row_tiles, k_full, full, empty, sizes, score_scale, softmax_scale,
                gl.constexpr(0), HEADS, NOPE, ROTARY, VALUE, BLOCK_I, STAGES,
            )),
            (_consume_queries, (
                pointers, k_tiles, q_tiles, row_tiles, k_full, full, empty, sizes, score_scale, softmax_scale,
                gl.constexpr(1), HEADS, NOPE, ROTARY, VALUE, BLOCK_I, STAGES,
            )),
            (_feed_queries, (
                q_descs, k_descs, q_columns, k_columns, rows_ptr, stride_row, q_tiles, k_tiles, row_tiles, k_full,
                full, empty, sizes, HEADS, BLOCK_I, STAGES,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, 24],
    )  # fmt: skip
