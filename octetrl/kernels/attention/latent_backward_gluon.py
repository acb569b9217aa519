"""The gradient of latent attention in Gluon, for Hopper. `latent_backward.py` has the formulas, calls this, and has a
twin of it in plain Triton, where all warps load, compute P and multiply in step.

Here three warpgroups work beside one another: two consumers, of 64 query rows or 64 keys each, and a feeder that loads
tiles by TMA into a ring. `full` and `empty` are the ring's barriers; each turn flips their phase. While one consumer
computes P, the other one multiplies. A consumer waits for its own products at the end of a tile, because ptxas would
serialise wgmma that are in flight across a loop.

    dQ       the keys twice: for the log-sum-exp and delta, which are stored for the next kernel, and then for dQ
    dK, dV   the queries once. Scores are keys by queries, so P^T and dS^T go into the next wgmma in registers

I query rows, J keys of a tile, T tokens, H heads; N, R and V sizes of one head. Written for Gluon of Triton 3.6.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octetrl.kernels.attention.latent_backward_kernels import LatentGradients, LatentOperands
from octetrl.kernels.attention.latent_dkdv_gluon import _dkdv_gluon_kernel
from octetrl.kernels.attention.latent_tiles_gluon import (
    ALIGN,
    BARRIER,
    ROWS,
    WIDE,
    clear_tile,
    find_sequence,
    mma_layout,
    request,
    scores,
    store_rows,
)

LOWEST = gl.constexpr(-1e30)


@gluon.jit
def _rows_tile(
    state, q_tiles, k_tiles, full, empty, consumer, turn, tile, query_I, score_scale,
    BLOCK_J: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    m_I, l_I, u_I = state
    LAYOUT: gl.constexpr = mma_layout(BLOCK_J)
    stage, phase = turn % STAGES, turn // STAGES & 1
    mbarrier.wait(full.index(stage), phase)
    s_IJ, dp_IJ = scores(q_tiles, k_tiles, consumer, stage, BLOCK_J)
    key_J = tile * BLOCK_J + gl.arange(0, BLOCK_J, gl.SliceLayout(0, LAYOUT))
    seen = gl.expand_dims(query_I, 1) >= gl.expand_dims(key_J, 0)
    if MASKED:
        s_IJ = gl.where(seen, s_IJ, float("-inf"))
    m_new_I = gl.maximum(m_I, gl.max(s_IJ, 1) * score_scale)
    p_IJ = gl.exp2(s_IJ * score_scale - gl.expand_dims(m_new_I, 1))
    alpha_I = gl.exp2(m_I - m_new_I)
    l_I = l_I * alpha_I + gl.sum(p_IJ, 1)
    dp_IJ = warpgroup_mma_wait(0, deps=[dp_IJ])
    mbarrier.arrive(empty.index(stage), count=1)
    if MASKED:
        dp_IJ = gl.where(seen, dp_IJ, 0.0)
    u_I = u_I * alpha_I + gl.sum(p_IJ * dp_IJ, 1)
    return m_new_I, l_I, u_I


@gluon.jit
def _dq_tile(
    state, q_tiles, k_tiles, full, empty, consumer, turn, tile, query_I, length, lse2_I, delta_I, score_scale,
    NOPE: gl.constexpr, ROTARY: gl.constexpr, VALUE: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    dq_IN, dq_IR = state
    LAYOUT: gl.constexpr = mma_layout(BLOCK_J)
    stage, phase = turn % STAGES, turn // STAGES & 1
    mbarrier.wait(full.index(stage), phase)
    if MASKED:  # noqa: SIM102 (the first is known to the compiler)
        if tile * BLOCK_J + BLOCK_J > length:
            clear_tile(k_tiles, stage, length - tile * BLOCK_J, NOPE, ROTARY, VALUE, BLOCK_J)
    s_IJ, dp_IJ = scores(q_tiles, k_tiles, consumer, stage, BLOCK_J)
    p_IJ = gl.exp2(s_IJ * score_scale - gl.expand_dims(lse2_I, 1))
    dp_IJ = warpgroup_mma_wait(0, deps=[dp_IJ])
    ds_IJ = p_IJ * (dp_IJ - gl.expand_dims(delta_I, 1))
    if MASKED:
        key_J = tile * BLOCK_J + gl.arange(0, BLOCK_J, gl.SliceLayout(0, LAYOUT))
        ds_IJ = gl.where(gl.expand_dims(query_I, 1) >= gl.expand_dims(key_J, 0), ds_IJ, 0.0)
    ds_IJ = ds_IJ.to(gl.bfloat16)
    ds_N = gl.convert_layout(ds_IJ, gl.DotOperandLayout(0, mma_layout(NOPE), 2))
    ds_R = gl.convert_layout(ds_IJ, gl.DotOperandLayout(0, mma_layout(ROTARY), 2))
    dq_IN = warpgroup_mma(ds_N, k_tiles[0].index(stage), dq_IN, is_async=True)
    dq_IR = warpgroup_mma(ds_R, k_tiles[1].index(stage), dq_IR, is_async=True)
    dq_IN, dq_IR = warpgroup_mma_wait(0, deps=[dq_IN, dq_IR])
    mbarrier.arrive(empty.index(stage), count=1)
    return dq_IN, dq_IR


@gluon.jit
def _consume_keys(
    pointers, stride_row, q_tiles, k_tiles, q_full, full, empty, sizes, score_scale, softmax_scale,
    CONSUMER: gl.constexpr, HEADS: gl.constexpr, NOPE: gl.constexpr, ROTARY: gl.constexpr, VALUE: gl.constexpr,
    BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup for rows CONSUMER * 64 to CONSUMER * 64 + 63 of the program."""
    rows_ptr, dq_ptr = pointers
    head, sequence, num_sequences, first, length, first_query = sizes
    S_ROWS: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK_J))
    query_I = first_query + CONSUMER * ROWS + gl.arange(0, ROWS, S_ROWS)
    dq_IN = gl.zeros([ROWS, NOPE], gl.float32, mma_layout(NOPE))
    dq_IR = gl.zeros([ROWS, ROTARY], gl.float32, mma_layout(ROTARY))
    if (sequence < num_sequences) & (length > 0):
        whole = first_query // BLOCK_J
        end = gl.cdiv(gl.minimum(length, first_query + 2 * ROWS), BLOCK_J)
        m_I = gl.full([ROWS], LOWEST, gl.float32, S_ROWS)
        l_I = gl.zeros([ROWS], gl.float32, S_ROWS)
        state = (m_I, l_I, l_I)
        mbarrier.wait(q_full, 0)
        for tile in range(0, whole):
            state = _rows_tile(
                state, q_tiles, k_tiles, full, empty, CONSUMER, tile, tile, query_I, score_scale, BLOCK_J, STAGES, False
            )
        for tile in range(whole, end):
            state = _rows_tile(
                state, q_tiles, k_tiles, full, empty, CONSUMER, tile, tile, query_I, score_scale, BLOCK_J, STAGES, True
            )
        inside_I = query_I < length
        lse2_I = gl.where(inside_I, state[0] + gl.log2(state[1]), 0.0)
        delta_I = gl.where(inside_I, state[2] / state[1], 0.0)
        row_ptr_I = rows_ptr + head.to(gl.int64) * stride_row + (first // ALIGN + sequence) * ALIGN + query_I
        gl.store(row_ptr_I, lse2_I, mask=inside_I)
        gl.store(row_ptr_I + stride_row.to(gl.int64) * HEADS, delta_I, mask=inside_I)
        found = (dq_IN, dq_IR)
        for tile in range(0, whole):
            found = _dq_tile(
                found, q_tiles, k_tiles, full, empty, CONSUMER, end + tile, tile, query_I, length, lse2_I, delta_I,
                score_scale, NOPE, ROTARY, VALUE, BLOCK_J, STAGES, False,
            )  # fmt: skip
        for tile in range(whole, end):
            found = _dq_tile(
                found, q_tiles, k_tiles, full, empty, CONSUMER, end + tile, tile, query_I, length, lse2_I, delta_I,
                score_scale, NOPE, ROTARY, VALUE, BLOCK_J, STAGES, True,
            )  # fmt: skip
        dq_IN, dq_IR = found
    SIZE: gl.constexpr = NOPE + ROTARY
    ptr = dq_ptr + (first.to(gl.int64) * HEADS + head) * SIZE
    row = first_query + CONSUMER * ROWS
    row_N = row + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(NOPE)))
    row_R = row + gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(ROTARY)))
    store_rows(ptr, dq_IN * softmax_scale, row_N, length, HEADS * SIZE, NOPE)
    store_rows(ptr + NOPE, dq_IR * softmax_scale, row_R, length, HEADS * SIZE, ROTARY)


@gluon.jit
def _feed_keys(
    q_descs, k_descs, q_columns, k_columns, q_tiles, k_tiles, q_full, full, empty, sizes,
    BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    _, sequence, num_sequences, first, length, first_query = sizes
    if (sequence < num_sequences) & (length > 0):
        row = first + first_query
        end = gl.cdiv(gl.minimum(length, first_query + 2 * ROWS), BLOCK_J)
        request(q_descs, q_columns, row, q_full, q_tiles, 0)
        request(q_descs, q_columns, row + ROWS, q_full, q_tiles, 1)
        for turn in range(0, 2 * end):
            stage = turn % STAGES
            tile = gl.where(turn < end, turn, turn - end)
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            request(k_descs, k_columns, first + tile * BLOCK_J, full.index(stage), k_tiles, stage)


@gluon.jit(do_not_specialize=["num_sequences", "num_tokens", "stride_row"])
def _dq_gluon_kernel(
    qn_desc, qr_desc, dout_desc, kn_desc, kr_desc, v_desc, rows_ptr, dq_ptr, cu_seqlens_ptr, score_scale,
    softmax_scale, num_sequences, num_tokens, stride_row, qn_head, qr_head, dout_head, kn_head, v_head,
    HEADS: gl.constexpr, NOPE: gl.constexpr, ROTARY: gl.constexpr, VALUE: gl.constexpr, BLOCK_J: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(0)
    sequence, first, length, number = find_sequence(
        gl.program_id(1), cu_seqlens_ptr, num_sequences, num_tokens, 2 * ROWS
    )
    inside = number * (2 * ROWS) < length
    length = gl.where(inside, length, 0)  # a program without rows does nothing
    # the last rows have the most keys: first
    first_query = gl.where(inside, gl.cdiv(length, 2 * ROWS) - 1 - number, 0) * (2 * ROWS)
    q_tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, NOPE], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, ROTARY], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, VALUE], WIDE),
    )
    k_tiles = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_J, NOPE], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_J, ROTARY], WIDE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_J, VALUE], WIDE),
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    sizes = (head, sequence, num_sequences, first, length, first_query)
    pointers = (rows_ptr, dq_ptr)
    q_descs, k_descs = (qn_desc, qr_desc, dout_desc), (kn_desc, kr_desc, v_desc)
    q_columns, k_columns = (head * qn_head, head * qr_head, head * dout_head), (head * kn_head, 0, head * v_head)
    gl.warp_specialize(
        [
            (_consume_keys, (
                pointers, stride_row, q_tiles, k_tiles, q_full, full, empty, sizes, score_scale, softmax_scale,
                gl.constexpr(0), HEADS, NOPE, ROTARY, VALUE, BLOCK_J, STAGES,
            )),
            (_consume_keys, (
                pointers, stride_row, q_tiles, k_tiles, q_full, full, empty, sizes, score_scale, softmax_scale,
                gl.constexpr(1), HEADS, NOPE, ROTARY, VALUE, BLOCK_J, STAGES,
            )),
            (_feed_keys, (
                q_descs, k_descs, q_columns, k_columns, q_tiles, k_tiles, q_full, full, empty, sizes, BLOCK_J, STAGES,
            )),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, 24],
    )  # fmt: skip


class GluonTiles(NamedTuple):
    """Keys of a tile and stages of the ring for dQ; queries of a tile and stages for dK and dV; registers."""

    keys: int = 64
    key_stages: int = 3
    queries: int = 32
    query_stages: int = 5
    registers: int = 232


def _descriptor(x_THD: Tensor, rows: int) -> TensorDescriptor:
    T, H, D = x_THD.shape
    shape = [T, (H - 1) * x_THD.stride(1) + D]
    return TensorDescriptor(x_THD, shape, [x_THD.stride(0), 1], [rows, D], WIDE.value)


TILES = GluonTiles()


def latent_backward_gluon(
    operands: LatentOperands, found: LatentGradients, softmax_scale: float, tiles: GluonTiles = TILES
) -> None:
    """`latent_backward` into `found`, for R = 64."""
    grid, rows, cu_seqlens_B1 = operands.grid(2 * ROWS.value), operands.rows, operands.cu_seqlens_B1
    numbers = operands.numbers(softmax_scale)
    shape = {**operands.shape, "CONSUMER_REGISTERS": tiles.registers, "num_warps": 4}

    def descriptors(queries: int, keys: int) -> list[TensorDescriptor]:
        return [_descriptor(x, queries) for x in operands.by_query] + [_descriptor(x, keys) for x in operands.by_key]

    _dq_gluon_kernel[grid](
        *descriptors(ROWS.value, tiles.keys), rows, found.q_THX, cu_seqlens_B1, *numbers,
        BLOCK_J=tiles.keys, STAGES=tiles.key_stages, **shape,
    )  # fmt: skip
    _dkdv_gluon_kernel[grid](
        *descriptors(tiles.queries, ROWS.value), rows, found.kv_THX, found.key_THR, cu_seqlens_B1, *numbers,
        BLOCK_I=tiles.queries, STAGES=tiles.query_stages, **shape,
    )  # fmt: skip
