"""Chunks of MLA's decode over pages of E4M3 latents in Gluon, for latents of 512 elements: a pipeline of warpgroups.

`latent_decode.py` has the layout and the order, calls this, and merges the chunks. One warpgroup that converts, scores,
weighs and sums in turns keeps loads, conversion and tensor cores waiting for each other. Here each warpgroup of a
program does one of these:

    two converters    load codes of every second tile, and store BF16 values in a ring of `STAGES` tiles
    scores            loads queries and rotary keys; scores, maxima, weights, and the sums of classes
    sums              o of all 512 columns; frees a tile of the ring when both products have read it

`full` and `empty` are the barriers of the ring, `weighed` and `taken` those of two slots of weights. Each turn of a
ring flips their phase. A program can go through several chunks. Up to `MOST_PROGRAMS` there is one for each chunk,
which was faster with sequences of unequal length (lab/log.md).

One warpgroup reads a tile once for all 16 heads, where two would read it twice. A thread has the same columns in scores
and in o, and the sums of classes stay in the layout in which they arise, so only the maxima of four warps are
exchanged. A warp stores values in 8 rows of 4 lanes: in 4 rows of 8, pairs of lanes would use the same banks.

N keys of a tile, C heads of a program, X classes, L latent elements, R of the rotary key. Written for Gluon of Triton
3.6.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octetrl.kernels.attention.attention_order import FLOOR, KV_CHUNK, LOG2E
from octetrl.kernels.gluon_compat import thread_barrier

LATENT_SIZE, ROTARY_SIZE = 512, 64  # what it is written for
MOST_PROGRAMS = 2048  # of a launch; with more chunks a program takes several
LOWEST = gl.constexpr(FLOOR)
N = gl.constexpr(64)
C = gl.constexpr(16)  # heads of one program
STAGES = 3
REGISTERS = 112, 144  # of a thread: scores, and each converter; the sums have the other 112 of 512
PART = gl.constexpr(16)  # keys whose codes are loaded and converted at a time
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
COLUMNS = gl.constexpr(gl.SliceLayout(0, MMA))
CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [2, 2], [1, 0]))
KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
MAXIMA = gl.constexpr(  # of four warps, all in each thread, columns as in MMA
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [1, 0], [2, 0]],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[4, 16],
    )
)
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FACTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
AHEAD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def values_of(codes, scale):
    """bf16(code * scale) in words of two: [N / 2, L / 2]."""
    scale, _ = gl.broadcast(gl.expand_dims(scale, 1), codes.to(gl.float32, bitcast=True))
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b, h0, h1, h2, h3;
        .reg .b32 p, q;
        .reg .f32 f0, f1, f2, f3;
        mov.b32 {a, b}, $2;
        cvt.rn.f16x2.e4m3x2 p, a;
        cvt.rn.f16x2.e4m3x2 q, b;
        mov.b32 {h0, h1}, p;
        mov.b32 {h2, h3}, q;
        cvt.f32.f16 f0, h0;
        cvt.f32.f16 f1, h1;
        cvt.f32.f16 f2, h2;
        cvt.f32.f16 f3, h3;
        mul.f32 f0, f0, $3;
        mul.f32 f1, f1, $3;
        mul.f32 f2, f2, $3;
        mul.f32 f3, f3, $3;
        cvt.rn.bf16x2.f32 $0, f1, f0;
        cvt.rn.bf16x2.f32 $1, f3, f2;
        }
        """,
        "=r,=r,r,r",
        [codes, scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(low, high), [codes.shape[0], 2 * codes.shape[1]])


@gluon.jit
def page_of(table_ptr, start, num_keys, PAGE_SIZE: gl.constexpr):
    """The page of a whole tile: tiles do not cross pages."""
    return gl.load(table_ptr + start // PAGE_SIZE, mask=start < num_keys, other=0)


@gluon.jit
def total(l_XC):
    """Neighbours first, then pairs of pairs: [16, C] to [C]."""
    l_XC = gl.sum(gl.reshape(l_XC, [8, 2, C]), 1)
    l_XC = gl.sum(gl.reshape(l_XC, [4, 2, C]), 1)
    l_XC = gl.sum(gl.reshape(l_XC, [2, 2, C]), 1)
    return gl.sum(l_XC, 0)


@gluon.jit
def load_queries(ptr, stride_head, first_head, HEADS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """[C, SIZE], zeros past the last head."""
    h = gl.expand_dims(first_head + gl.arange(0, C, gl.SliceLayout(1, LAYOUT)), 1)
    c = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(ptr + h * stride_head + c, mask=(h < HEADS) & (c < SIZE), other=0.0)


@gluon.jit
def _load_part(
    latent_ptr, scale_ptr, page, start, end, INDEX: gl.constexpr, LATENT: gl.constexpr, PAGE_SIZE: gl.constexpr
):
    """Part `INDEX` of the tile at `start`: codes in words of four, and scales; zeros where there is no key."""
    row = page.to(gl.int64) * PAGE_SIZE + start % PAGE_SIZE + INDEX * PART
    n = gl.arange(0, PART, gl.SliceLayout(1, CODES))
    word = gl.expand_dims(gl.arange(0, LATENT // 4, gl.SliceLayout(0, CODES)), 0)
    there = start + INDEX * PART + n < end
    offset = gl.expand_dims(n, 1) * (LATENT // 4) + word
    mask = gl.expand_dims(there, 1) & (word < LATENT)
    codes = gl.load(latent_ptr.to(gl.pointer_type(gl.int32)) + row * (LATENT // 4) + offset, mask=mask, other=0)
    return codes, gl.load(scale_ptr + row + n, mask=there, other=0.0)


@gluon.jit
def _copy_keys(keys, key_ptr, page, start, end, ROTARY: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Begin to copy a tile's rotary keys, zeros where there is no key."""
    base = page.to(gl.int64) * PAGE_SIZE + start % PAGE_SIZE
    n = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(1, KEYS)), 1)
    k = gl.expand_dims(gl.arange(0, ROTARY, gl.SliceLayout(0, KEYS)), 0)
    mask = (start + n < end) & (k < ROTARY)
    async_copy.async_copy_global_to_shared(keys, key_ptr + base * ROTARY + n * ROTARY + k, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _classes(p_NC):
    """Sums over bits 3 and 0 of the key's place, in the layout in which they arise: [16, C]."""
    sums = gl.sum(gl.reshape(p_NC, [4, 2, 8, C]), 1)
    return gl.sum(gl.reshape(sums, [16, 2, C]), 1)


@gluon.jit
def _largest(s_NC, maxima):
    """Maximum of each column. `maxima`: shared memory for those of the warps."""
    maxima.store(gl.max(gl.reshape(s_NC, [4, N // 4, C]), 1))
    thread_barrier()
    return gl.convert_layout(gl.max(maxima.load(MAXIMA), 0), COLUMNS)


@gluon.jit
def _items(sizes, HEADS: gl.constexpr):
    """Number of chunks and blocks of heads. `sizes`: (sequences, chunks of a sequence)."""
    return (HEADS + C - 1) // C * sizes[0] * sizes[1]


@gluon.jit
def _seek(item, sizes, contexts_ptr, HEADS: gl.constexpr, CHUNK: gl.constexpr):
    """The program's first item from `item` on that has keys, or one 32 items later. One load for each would be slow."""
    BLOCKS: gl.constexpr = (HEADS + C - 1) // C
    n = gl.arange(0, 32, AHEAD)
    items = item + n * gl.num_programs(0)
    contexts = gl.load(contexts_ptr + items // BLOCKS % sizes[0], mask=items < _items(sizes, HEADS), other=0)
    return item + gl.min(gl.where(contexts > items // BLOCKS // sizes[0] * CHUNK, n, 32), 0) * gl.num_programs(0)


@gluon.jit
def _chunk_of(item, sequences, contexts_ptr, HEADS: gl.constexpr, CHUNK: gl.constexpr):
    """(first head, sequence, chunk, its first key, its end, its number of tiles) of a program's item."""
    BLOCKS: gl.constexpr = (HEADS + C - 1) // C
    sequence = item // BLOCKS % sequences
    chunk = item // BLOCKS // sequences
    first = chunk * CHUNK
    end = gl.minimum(first + CHUNK, gl.load(contexts_ptr + sequence))
    return item % BLOCKS * C, sequence.to(gl.int64), chunk, first, end, gl.cdiv(gl.maximum(end - first, 0), N)


@gluon.jit
def _convert(
    pointers, sizes, table_ptr, contexts_ptr, stride_table, ring, full, empty, WHICH: gl.constexpr,
    HEADS: gl.constexpr, LATENT: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that loads and converts every second tile."""
    latent_ptr, scale_ptr = pointers
    before = 0  # tiles of earlier chunks
    item = _seek(gl.program_id(0), sizes, contexts_ptr, HEADS, CHUNK)
    while item < _items(sizes, HEADS):
        _, sequence, _, first, end, tiles = _chunk_of(item, sizes[0], contexts_ptr, HEADS, CHUNK)
        pages_ptr = table_ptr + sequence * stride_table
        own = (before + WHICH) % 2
        start = first + own * N
        page = page_of(pages_ptr, start, end, PAGE_SIZE)
        codes_0, scale_0 = _load_part(latent_ptr, scale_ptr, page, start, end, 0, LATENT, PAGE_SIZE)
        codes_1, scale_1 = _load_part(latent_ptr, scale_ptr, page, start, end, 1, LATENT, PAGE_SIZE)
        codes_2, scale_2 = _load_part(latent_ptr, scale_ptr, page, start, end, 2, LATENT, PAGE_SIZE)
        codes_3, scale_3 = _load_part(latent_ptr, scale_ptr, page, start, end, 3, LATENT, PAGE_SIZE)
        page = page_of(pages_ptr, start + 2 * N, end, PAGE_SIZE)
        for i in range(own, tiles, 2):
            tile = before + i
            stage = tile % STAGES
            following = first + i * N + 2 * N
            mbarrier.wait(empty.index(stage), (tile // STAGES & 1) ^ 1)
            words = ring.index(stage)
            words.slice(0, PART).store(values_of(codes_0, scale_0))
            codes_0, scale_0 = _load_part(latent_ptr, scale_ptr, page, following, end, 0, LATENT, PAGE_SIZE)
            words.slice(PART, PART).store(values_of(codes_1, scale_1))
            codes_1, scale_1 = _load_part(latent_ptr, scale_ptr, page, following, end, 1, LATENT, PAGE_SIZE)
            words.slice(2 * PART, PART).store(values_of(codes_2, scale_2))
            codes_2, scale_2 = _load_part(latent_ptr, scale_ptr, page, following, end, 2, LATENT, PAGE_SIZE)
            words.slice(3 * PART, PART).store(values_of(codes_3, scale_3))
            codes_3, scale_3 = _load_part(latent_ptr, scale_ptr, page, following, end, 3, LATENT, PAGE_SIZE)
            page = page_of(pages_ptr, following + 2 * N, end, PAGE_SIZE)
            fence_async_shared()
            thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
        before += tiles
        item = _seek(item + gl.num_programs(0), sizes, contexts_ptr, HEADS, CHUNK)


@gluon.jit
def _score(
    pointers, strides, sizes, table_ptr, contexts_ptr, score_scale, values, full, shared, weighed, taken,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROTARY: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of scores and weights."""
    q_latent_ptr, q_rotary_ptr, key_ptr, m_ptr, l_ptr = pointers
    stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_table = strides
    q_latent, q_rotary, keys, weights, factors, maxima = shared
    before = 0
    item = _seek(gl.program_id(0), sizes, contexts_ptr, HEADS, CHUNK)
    while item < _items(sizes, HEADS):
        first_head, sequence, chunk, first, end, tiles = _chunk_of(item, sizes[0], contexts_ptr, HEADS, CHUNK)
        if tiles > 0:
            pages_ptr = table_ptr + sequence * stride_table
            page = page_of(pages_ptr, first, end, PAGE_SIZE)
            _copy_keys(keys, key_ptr, page, first, end, ROTARY, PAGE_SIZE)
            page = page_of(pages_ptr, first + N, end, PAGE_SIZE)
            ql_ptr, qr_ptr = q_latent_ptr + sequence * stride_ql_token, q_rotary_ptr + sequence * stride_qr_token
            q_latent.store(load_queries(ql_ptr, stride_ql_head, first_head, HEADS, LATENT, KEYS))
            q_rotary.store(load_queries(qr_ptr, stride_qr_head, first_head, HEADS, ROTARY, KEYS))
            fence_async_shared()
            thread_barrier()
            zero = gl.zeros([N, C], gl.float32, MMA)
            m_C = gl.full([C], LOWEST, gl.float32, COLUMNS)
            l_XC = _classes(zero)
            CLASSES: gl.constexpr = l_XC.type.layout
            for i in range(0, tiles):
                tile, start = before + i, first + i * N
                stage, slot = tile % STAGES, tile % 2
                mbarrier.wait(full.index(stage), tile // STAGES & 1)
                s_NC = warpgroup_mma(values.index(stage), q_latent.permute((1, 0)), zero, use_acc=False, is_async=True)
                async_copy.wait_group(0)
                fence_async_shared()
                thread_barrier()
                s_NC = warpgroup_mma(keys, q_rotary.permute((1, 0)), s_NC, is_async=True)
                s_NC = warpgroup_mma_wait(0, deps=[s_NC])
                there_N = start + gl.arange(0, N, gl.SliceLayout(1, MMA)) < end
                s_NC = gl.where(gl.expand_dims(there_N, 1), s_NC * score_scale, float("-inf"))
                m_new_C = gl.maximum(m_C, _largest(s_NC, maxima))
                _copy_keys(keys, key_ptr, page, start + N, end, ROTARY, PAGE_SIZE)  # all warps have read the keys
                page = page_of(pages_ptr, start + 2 * N, end, PAGE_SIZE)
                alpha_C = gl.exp2(m_C - m_new_C)
                p_NC = gl.exp2(s_NC - gl.expand_dims(m_new_C, 0))
                mbarrier.wait(taken.index(slot), (tile // 2 & 1) ^ 1)
                weights.index(slot).store(p_NC.to(gl.bfloat16))
                factors.index(slot).store(alpha_C)
                fence_async_shared()
                thread_barrier()
                mbarrier.arrive(weighed.index(slot), count=1)
                alpha_X = gl.convert_layout(alpha_C, gl.SliceLayout(0, CLASSES))
                l_XC = l_XC * gl.expand_dims(alpha_X, 0) + gl.convert_layout(_classes(p_NC), CLASSES)
                m_C = m_new_C
            async_copy.wait_group(0)
            row = (sequence * sizes[1] + chunk) * HEADS
            head_C = first_head + gl.arange(0, C, COLUMNS)
            gl.store(m_ptr + row + head_C, m_C, mask=head_C < HEADS)
            gl.store(l_ptr + row + head_C, gl.convert_layout(total(l_XC), COLUMNS), mask=head_C < HEADS)
            before += tiles
        item = _seek(item + gl.num_programs(0), sizes, contexts_ptr, HEADS, CHUNK)


@gluon.jit
def _sum(
    o_ptr, sizes, contexts_ptr, values, full, empty, weights, factors, weighed, taken,
    HEADS: gl.constexpr, LATENT: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup of o."""
    before = 0
    item = _seek(gl.program_id(0), sizes, contexts_ptr, HEADS, CHUNK)
    while item < _items(sizes, HEADS):
        first_head, sequence, chunk, _, _, tiles = _chunk_of(item, sizes[0], contexts_ptr, HEADS, CHUNK)
        if tiles > 0:
            o_LC = gl.zeros([LATENT, C], gl.float32, MMA)
            for i in range(0, tiles):
                tile = before + i
                stage, slot = tile % STAGES, tile % 2
                mbarrier.wait(full.index(stage), tile // STAGES & 1)
                mbarrier.wait(weighed.index(slot), tile // 2 & 1)
                o_LC = o_LC * gl.expand_dims(factors.index(slot).load(COLUMNS), 0)
                o_LC = warpgroup_mma(values.index(stage).permute((1, 0)), weights.index(slot), o_LC, is_async=True)
                o_LC = warpgroup_mma_wait(0, deps=[o_LC])
                thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                mbarrier.arrive(taken.index(slot), count=1)
            row = (sequence * sizes[1] + chunk) * HEADS
            head = gl.expand_dims(first_head + gl.arange(0, C, COLUMNS), 0)
            element = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(1, MMA)), 1)
            gl.store(o_ptr + (row + head) * LATENT + element, o_LC, mask=(head < HEADS) & (element < LATENT))
            before += tiles
        item = _seek(item + gl.num_programs(0), sizes, contexts_ptr, HEADS, CHUNK)


@gluon.jit(do_not_specialize=["stride_table", "sequences", "max_chunks"])
def _latent_chunks_gluon_kernel(
    q_latent_ptr, q_rotary_ptr, latent_ptr, key_ptr, scale_ptr, table_ptr, contexts_ptr, m_ptr, l_ptr, o_ptr,
    stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_table, sequences, max_chunks, score_scale,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROTARY: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, SCORE_REGISTERS: gl.constexpr, CONVERTER_REGISTERS: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, LATENT], WIDE)
    ring = values._reinterpret(gl.int32, [STAGES, N, LATENT // 2], WORDS)
    keys = gl.allocate_shared_memory(gl.bfloat16, [N, ROTARY], WIDE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, N, C], NARROW)
    q_latent = gl.allocate_shared_memory(gl.bfloat16, [C, LATENT], WIDE)
    q_rotary = gl.allocate_shared_memory(gl.bfloat16, [C, ROTARY], WIDE)
    maxima = gl.allocate_shared_memory(gl.float32, [4, C], PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [2, C], FACTORS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(weighed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    sizes = (sequences, max_chunks)
    strides = (stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_table)
    shared = (q_latent, q_rotary, keys, weights, factors, maxima)
    codes = (latent_ptr, scale_ptr)
    gl.warp_specialize(
        [
            (_sum, (
                o_ptr, sizes, contexts_ptr, values, full, empty, weights, factors, weighed, taken,
                HEADS, LATENT, CHUNK, STAGES,
            )),
            (_score, (
                (q_latent_ptr, q_rotary_ptr, key_ptr, m_ptr, l_ptr), strides, sizes, table_ptr, contexts_ptr,
                score_scale, values, full, shared, weighed, taken, HEADS, LATENT, ROTARY, PAGE_SIZE, CHUNK, STAGES,
            )),
            (_convert, (
                codes, sizes, table_ptr, contexts_ptr, stride_table, ring, full, empty, gl.constexpr(0), HEADS,
                LATENT, PAGE_SIZE, CHUNK, STAGES,
            )),
            (_convert, (
                codes, sizes, table_ptr, contexts_ptr, stride_table, ring, full, empty, gl.constexpr(1), HEADS,
                LATENT, PAGE_SIZE, CHUNK, STAGES,
            )),
        ],
        [4, 4, 4],
        [SCORE_REGISTERS, CONVERTER_REGISTERS, CONVERTER_REGISTERS],
    )  # fmt: skip


def latent_decode_gluon(
    q_latent_BHC: Tensor,
    q_rotary_BHR: Tensor,
    latent_pages: Tensor,
    key_pages: Tensor,
    token_scale: Tensor,
    block_table_BP: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    chunks: tuple[Tensor, Tensor, Tensor],
) -> None:
    """m, l [B, S, H] and o [B, S, H, C] of each chunk into `chunks`. C = 512, R = 64, codes E4M3, BF16 keys and
    queries; pages of a multiple of 64 tokens."""
    (sequences, heads), (m_BSH, l_BSH, o_BSHC) = q_latent_BHC.shape[:2], chunks
    shape: dict[str, Any] = {"HEADS": heads, "LATENT": LATENT_SIZE, "ROTARY": ROTARY_SIZE, "CHUNK": KV_CHUNK}
    items = triton.cdiv(heads, 16) * sequences * m_BSH.shape[1]
    _latent_chunks_gluon_kernel[(min(items, MOST_PROGRAMS),)](
        q_latent_BHC, q_rotary_BHR, latent_pages, key_pages, token_scale, block_table_BP, context_lens_B,
        m_BSH, l_BSH, o_BSHC, *q_latent_BHC.stride()[:2], *q_rotary_BHR.stride()[:2], block_table_BP.stride(0),
        sequences, m_BSH.shape[1], softmax_scale * LOG2E, PAGE_SIZE=latent_pages.shape[1], STAGES=STAGES,
        SCORE_REGISTERS=REGISTERS[0], CONVERTER_REGISTERS=REGISTERS[1], num_warps=4, enable_fp_fusion=False, **shape,
    )  # fmt: skip
