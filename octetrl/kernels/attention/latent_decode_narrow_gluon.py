"""A chunk of MLA's decode over E4M3 latents by one warpgroup: same bits as `latent_decode_gluon.py`, fewer barriers.

That kernel has two warpgroups. Each reads a whole tile from shared memory to compute the scores of 8 heads. Here one
warpgroup reads it once for 16. A thread has the same columns in scores and outputs, so factors need no exchange, and
the sums of classes stay in the layout in which they arise. Only the maxima of four warps are exchanged.

A warp stores values in 8 rows of 4 lanes. In 4 rows of 8 lanes, pairs of lanes would use the same banks.

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from octetrl.kernels.attention.attention_order import KV_CHUNK, LOG2E
from octetrl.kernels.attention.latent_decode_gluon import (
    LATENT_SIZE,
    LOWEST,
    ROTARY_SIZE,
    C,
    N,
    _load_queries,
    _page_of,
    _total,
    _values_of,
)
from octetrl.kernels.gluon_names import thread_barrier

WARPS = 4
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
COLUMNS = gl.constexpr(gl.SliceLayout(0, MMA))
CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [2, 2], [1, 0]))
PART = gl.constexpr(16)  # keys whose codes are loaded and converted at a time
KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0]))
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [32, 1], [2, 2], [0, 1]))
MAXIMA = gl.constexpr(  # of four warps, all in each thread, columns as in MMA
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [1, 0], [2, 0]],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[4, 16],
    )
)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


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
def _weigh(s_NC, m_C, l_XC, o_LC, maxima, weights):
    """Weights of a tile into shared memory; new m and l, and o times its factor."""
    m_new_C = gl.maximum(m_C, _largest(s_NC, maxima))
    alpha_C = gl.exp2(m_C - m_new_C)
    p_NC = gl.exp2(s_NC - gl.expand_dims(m_new_C, 0))
    weights.store(p_NC.to(gl.bfloat16))
    CLASSES: gl.constexpr = l_XC.type.layout
    alpha_X = gl.convert_layout(alpha_C, gl.SliceLayout(0, CLASSES))
    l_XC = l_XC * gl.expand_dims(alpha_X, 0) + gl.convert_layout(_classes(p_NC), CLASSES)
    return m_new_C, l_XC, o_LC * gl.expand_dims(alpha_C, 0)


@gluon.jit
def _store_chunk(m_ptr, l_ptr, o_ptr, row, first_head, m_C, l_XC, o_LC, HEADS: gl.constexpr, LATENT: gl.constexpr):
    """m, l and o of a chunk; `row`: number of the chunk's head 0."""
    head_C = first_head + gl.arange(0, C, COLUMNS)
    total_C = gl.convert_layout(_total(l_XC), COLUMNS)
    gl.store(m_ptr + row + head_C, m_C, mask=head_C < HEADS)
    gl.store(l_ptr + row + head_C, total_C, mask=head_C < HEADS)
    h_O = first_head + gl.arange(0, C, gl.SliceLayout(0, OUT))
    l_O = gl.arange(0, LATENT, gl.SliceLayout(1, OUT))
    o_ptrs = o_ptr + (row + gl.expand_dims(h_O, 0)) * LATENT + gl.expand_dims(l_O, 1)
    gl.store(o_ptrs, gl.convert_layout(o_LC, OUT), mask=gl.expand_dims(h_O < HEADS, 0) & (gl.expand_dims(l_O, 1) >= 0))


@gluon.jit(do_not_specialize=["stride_table", "max_chunks"])
def _latent_decode_narrow_gluon_kernel(
    q_latent_ptr, q_rotary_ptr, latent_ptr, key_ptr, scale_ptr, table_ptr, contexts_ptr, m_ptr, l_ptr, o_ptr,
    stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_table, max_chunks, score_scale,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROTARY: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    first_head = gl.program_id(0) * C
    sequence = gl.program_id(1).to(gl.int64)
    num_keys = gl.load(contexts_ptr + sequence)
    first = gl.program_id(2) * CHUNK
    if first < num_keys:
        table_ptr += sequence * stride_table
        end = gl.minimum(first + CHUNK, num_keys)
        page = _page_of(table_ptr, first, num_keys, PAGE_SIZE)
        codes_0, scale_0 = _load_part(latent_ptr, scale_ptr, page, first, end, 0, LATENT, PAGE_SIZE)
        codes_1, scale_1 = _load_part(latent_ptr, scale_ptr, page, first, end, 1, LATENT, PAGE_SIZE)
        codes_2, scale_2 = _load_part(latent_ptr, scale_ptr, page, first, end, 2, LATENT, PAGE_SIZE)
        codes_3, scale_3 = _load_part(latent_ptr, scale_ptr, page, first, end, 3, LATENT, PAGE_SIZE)
        values = gl.allocate_shared_memory(gl.bfloat16, [N, LATENT], WIDE)
        keys = gl.allocate_shared_memory(gl.bfloat16, [N, ROTARY], WIDE)
        _copy_keys(keys, key_ptr, page, first, num_keys, ROTARY, PAGE_SIZE)
        page = _page_of(table_ptr, first + N, end, PAGE_SIZE)
        weights = gl.allocate_shared_memory(gl.bfloat16, [N, C], NARROW)
        q_latent = gl.allocate_shared_memory(gl.bfloat16, [C, LATENT], WIDE)
        q_rotary = gl.allocate_shared_memory(gl.bfloat16, [C, ROTARY], WIDE)
        maxima = gl.allocate_shared_memory(gl.float32, [4, C], PLAIN)
        value_words = values._reinterpret(gl.int32, [N, LATENT // 2], WORDS)
        ql_ptr, qr_ptr = q_latent_ptr + sequence * stride_ql_token, q_rotary_ptr + sequence * stride_qr_token
        q_latent.store(_load_queries(ql_ptr, stride_ql_head, first_head, HEADS, LATENT, KEYS))
        q_rotary.store(_load_queries(qr_ptr, stride_qr_head, first_head, HEADS, ROTARY, KEYS))
        zero = gl.zeros([N, C], gl.float32, MMA)
        m_C = gl.full([C], LOWEST, gl.float32, COLUMNS)
        l_XC = _classes(zero)
        o_LC = gl.zeros([LATENT, C], gl.float32, MMA)
        for start in range(first, end, N):
            following = start + N
            value_words.slice(0 * PART, PART).store(_values_of(codes_0, scale_0))
            codes_0, scale_0 = _load_part(latent_ptr, scale_ptr, page, following, end, 0, LATENT, PAGE_SIZE)
            value_words.slice(1 * PART, PART).store(_values_of(codes_1, scale_1))
            codes_1, scale_1 = _load_part(latent_ptr, scale_ptr, page, following, end, 1, LATENT, PAGE_SIZE)
            value_words.slice(2 * PART, PART).store(_values_of(codes_2, scale_2))
            codes_2, scale_2 = _load_part(latent_ptr, scale_ptr, page, following, end, 2, LATENT, PAGE_SIZE)
            value_words.slice(3 * PART, PART).store(_values_of(codes_3, scale_3))
            codes_3, scale_3 = _load_part(latent_ptr, scale_ptr, page, following, end, 3, LATENT, PAGE_SIZE)
            async_copy.wait_group(0)
            fence_async_shared()
            thread_barrier()
            s_NC = warpgroup_mma(values, q_latent.permute((1, 0)), zero, use_acc=False, is_async=True)
            s_NC = warpgroup_mma(keys, q_rotary.permute((1, 0)), s_NC, is_async=True)
            s_NC = warpgroup_mma_wait(0, deps=[s_NC])
            there_N = start + gl.arange(0, N, gl.SliceLayout(1, MMA)) < num_keys
            s_NC = gl.where(gl.expand_dims(there_N, 1), s_NC * score_scale, float("-inf"))
            m_C, l_XC, o_LC = _weigh(s_NC, m_C, l_XC, o_LC, maxima, weights)
            _copy_keys(keys, key_ptr, page, start + N, end, ROTARY, PAGE_SIZE)  # all warps have read the keys
            page = _page_of(table_ptr, start + 2 * N, end, PAGE_SIZE)
            fence_async_shared()
            thread_barrier()
            o_LC = warpgroup_mma(values.permute((1, 0)), weights, o_LC, is_async=True)
            o_LC = warpgroup_mma_wait(0, deps=[o_LC])
            thread_barrier()
        async_copy.wait_group(0)
        row = (sequence * max_chunks + gl.program_id(2)) * HEADS
        _store_chunk(m_ptr, l_ptr, o_ptr, row, first_head, m_C, l_XC, o_LC, HEADS, LATENT)


def latent_decode_narrow(
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
    """Write m, l [B, S, H] and o [B, S, H, C] of each chunk into `chunks`, as `latent_decode_gluon`."""
    (sequences, heads), (m_BSH, l_BSH, o_BSHC) = q_latent_BHC.shape[:2], chunks
    shape: dict[str, Any] = {"HEADS": heads, "LATENT": LATENT_SIZE, "ROTARY": ROTARY_SIZE, "CHUNK": KV_CHUNK}
    _latent_decode_narrow_gluon_kernel[(triton.cdiv(heads, 16), sequences, m_BSH.shape[1])](
        q_latent_BHC, q_rotary_BHR, latent_pages, key_pages, token_scale, block_table_BP, context_lens_B,
        m_BSH, l_BSH, o_BSHC, *q_latent_BHC.stride()[:2], *q_rotary_BHR.stride()[:2], block_table_BP.stride(0),
        m_BSH.shape[1], softmax_scale * LOG2E, PAGE_SIZE=latent_pages.shape[1], num_warps=WARPS,
        enable_fp_fusion=False, **shape,
    )  # fmt: skip
