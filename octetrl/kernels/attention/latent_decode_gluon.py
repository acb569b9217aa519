"""MLA's decode over pages of E4M3 latents in Gluon, for latents of 512 elements.

`latent_decode.py` has the layout and the two ways, whole and by chunks, and calls this. Codes become BF16 values once,
in shared memory, where both products read them as they lie. The codes of the next tile are loaded into registers while
a tile is multiplied. By chunks, a program takes 128 registers a thread and 95 KB: two share a multiprocessor. Chunks
run here only if the pipeline of `latent_decode_chunks_gluon.py` does not compile.

N keys of a tile, C heads of a program, X classes, L latent elements, R of the rotary key. Written for Gluon of Triton
3.6.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from octetrl.kernels.attention.attention_order import FLOOR, KV_CHUNK, LOG2E
from octetrl.kernels.gluon_names import thread_barrier

LATENT_SIZE, ROTARY_SIZE = 512, 64  # what it is written for
LOWEST = gl.constexpr(FLOOR)
N = gl.constexpr(64)
C = gl.constexpr(16)  # heads of one program


@gluon.jit
def _load_codes(
    latent_ptr, scale_ptr, page, start, num_keys, LATENT: gl.constexpr, PAGE_SIZE: gl.constexpr, VL: gl.constexpr
):
    """Half a tile: scales [N / 2], and codes in words of four [N / 2, L / 4]. Bytes that a loop carries would take a
    register each."""
    base = page.to(gl.int64) * PAGE_SIZE + start % PAGE_SIZE
    n_V = gl.arange(0, N // 2, gl.SliceLayout(1, VL))
    there_V = start + n_V < num_keys
    word = gl.expand_dims(gl.arange(0, LATENT // 4, gl.SliceLayout(0, VL)), 0)
    offset_VL = gl.expand_dims(n_V, 1) * (LATENT // 4) + word
    mask_VL = gl.expand_dims(there_V, 1) & (word < LATENT)
    codes = gl.load(latent_ptr.to(gl.pointer_type(gl.int32)) + base * (LATENT // 4) + offset_VL, mask=mask_VL, other=0)
    return codes, gl.load(scale_ptr + base + n_V, mask=there_V, other=0.0)


@gluon.jit
def _load_keys(key_ptr, page, start, num_keys, ROTARY: gl.constexpr, PAGE_SIZE: gl.constexpr, KL: gl.constexpr):
    """A tile's rotary keys, in words of two: [N, R / 2]."""
    base = page.to(gl.int64) * PAGE_SIZE + start % PAGE_SIZE
    n_K = gl.arange(0, N, gl.SliceLayout(1, KL))
    k = gl.arange(0, ROTARY // 2, gl.SliceLayout(0, KL))
    offset_KK = gl.expand_dims(n_K, 1) * (ROTARY // 2) + gl.expand_dims(k, 0)
    mask_KK = gl.expand_dims(start + n_K < num_keys, 1) & (gl.expand_dims(k, 0) < ROTARY)
    return gl.load(key_ptr.to(gl.pointer_type(gl.int32)) + base * (ROTARY // 2) + offset_KK, mask=mask_KK, other=0)


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
def _merge(m_C, l_C, o_LC, m_chunk_C, total_C, o_chunk_LC, OC: gl.constexpr):
    """The total with one more chunk, as `merge_columns`."""
    m_new_C = gl.maximum(m_C, m_chunk_C)
    before_C = gl.exp2(m_C - m_new_C)
    here_C = gl.exp2(m_chunk_C - m_new_C)
    l_C = gl.fma(total_C, here_C, l_C * before_C)
    here_LC, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(here_C, OC), 0), o_LC)
    o_LC = gl.fma(o_chunk_LC, here_LC, o_LC * gl.expand_dims(gl.convert_layout(before_C, OC), 0))
    return m_new_C, l_C, o_LC


@gluon.jit
def load_queries(ptr, stride_head, first_head, HEADS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """[C, SIZE], zeros past the last head."""
    h = gl.expand_dims(first_head + gl.arange(0, C, gl.SliceLayout(1, LAYOUT)), 1)
    c = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(ptr + h * stride_head + c, mask=(h < HEADS) & (c < SIZE), other=0.0)


@gluon.jit(do_not_specialize=["stride_table", "max_chunks"])
def _latent_decode_gluon_kernel(
    q_latent_ptr, q_rotary_ptr, latent_ptr, key_ptr, scale_ptr, out_ptr, table_ptr, contexts_ptr, m_ptr, l_ptr, o_ptr,
    stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_table, max_chunks, score_scale,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROTARY: gl.constexpr, PAGE_SIZE: gl.constexpr, CHUNK: gl.constexpr,
    SPLIT: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr, VL: gl.constexpr, KL: gl.constexpr, LL: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    SC: gl.constexpr = gl.SliceLayout(0, SL)
    OC: gl.constexpr = gl.SliceLayout(0, OL)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    first_head = gl.program_id(0) * C
    sequence = gl.program_id(1).to(gl.int64)
    num_keys = gl.load(contexts_ptr + sequence)
    first = gl.program_id(2) * CHUNK
    if first < num_keys or not SPLIT:
        table_ptr += sequence * stride_table
        end = num_keys
        if SPLIT:
            end = gl.minimum(first + CHUNK, num_keys)
        page = page_of(table_ptr, first, num_keys, PAGE_SIZE)
        codes_0, scale_0 = _load_codes(latent_ptr, scale_ptr, page, first, num_keys, LATENT, PAGE_SIZE, VL)
        codes_1, scale_1 = _load_codes(latent_ptr, scale_ptr, page, first + N // 2, num_keys, LATENT, PAGE_SIZE, VL)
        key = _load_keys(key_ptr, page, first, num_keys, ROTARY, PAGE_SIZE, KL)
        page = page_of(table_ptr, first + N, end, PAGE_SIZE)
        values = gl.allocate_shared_memory(gl.bfloat16, [N, LATENT], WIDE)
        keys = gl.allocate_shared_memory(gl.bfloat16, [N, ROTARY], WIDE)
        weights = gl.allocate_shared_memory(gl.bfloat16, [N, C], NARROW)
        q_latent = gl.allocate_shared_memory(gl.bfloat16, [C, LATENT], WIDE)
        q_rotary = gl.allocate_shared_memory(gl.bfloat16, [C, ROTARY], WIDE)
        WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
        value_words = values._reinterpret(gl.int32, [N, LATENT // 2], WORDS)
        key_words = keys._reinterpret(gl.int32, [N, ROTARY // 2], WORDS)
        ql_ptr, qr_ptr = q_latent_ptr + sequence * stride_ql_token, q_rotary_ptr + sequence * stride_qr_token
        q_latent.store(load_queries(ql_ptr, stride_ql_head, first_head, HEADS, LATENT, VL))
        q_rotary.store(load_queries(qr_ptr, stride_qr_head, first_head, HEADS, ROTARY, KL))
        zero = gl.zeros([N, C], gl.float32, SL)
        m_C = gl.full([C], LOWEST, gl.float32, SC)
        l_C = gl.zeros([C], gl.float32, SC)
        o_LC = gl.zeros([LATENT, C], gl.float32, OL)
        m_chunk_C = gl.full([C], LOWEST, gl.float32, SC)
        l_chunk_XC = gl.zeros([16, C], gl.float32, LL)
        o_chunk_LC = gl.zeros([LATENT, C], gl.float32, OL)
        for start in range(first, end, N):
            value_words.slice(0, N // 2).store(values_of(codes_0, scale_0))
            codes_0, scale_0 = _load_codes(latent_ptr, scale_ptr, page, start + N, end, LATENT, PAGE_SIZE, VL)
            value_words.slice(N // 2, N // 2).store(values_of(codes_1, scale_1))
            codes_1, scale_1 = _load_codes(latent_ptr, scale_ptr, page, start + N + N // 2, end, LATENT, PAGE_SIZE, VL)
            key_words.store(key)
            key = _load_keys(key_ptr, page, start + N, end, ROTARY, PAGE_SIZE, KL)
            page = page_of(table_ptr, start + 2 * N, end, PAGE_SIZE)
            fence_async_shared()
            thread_barrier()
            s_NC = warpgroup_mma(values, q_latent.permute((1, 0)), zero, use_acc=False, is_async=True)
            s_NC = warpgroup_mma(keys, q_rotary.permute((1, 0)), s_NC, is_async=True)
            s_NC = warpgroup_mma_wait(0, deps=[s_NC])
            there_N = start + gl.arange(0, N, gl.SliceLayout(1, SL)) < num_keys
            s_NC = gl.where(gl.expand_dims(there_N, 1), s_NC * score_scale, float("-inf"))
            if not SPLIT:  # noqa: SIM102  (one condition would be computed at run time by chunks too)
                if start % CHUNK == 0 and start > 0:
                    total_C = gl.convert_layout(total(l_chunk_XC), SC)
                    m_C, l_C, o_LC = _merge(m_C, l_C, o_LC, m_chunk_C, total_C, o_chunk_LC, OC)
                    m_chunk_C = gl.full([C], LOWEST, gl.float32, SC)
            m_new_C = gl.maximum(m_chunk_C, gl.max(s_NC, 0))
            alpha_C = gl.exp2(m_chunk_C - m_new_C)
            p_NC = gl.exp2(s_NC - gl.expand_dims(m_new_C, 0))
            weights.store(p_NC.to(gl.bfloat16))
            sums = gl.sum(gl.reshape(p_NC, [4, 2, 8, C]), 1)
            sums = gl.sum(gl.reshape(sums, [16, 2, C]), 1)
            alpha_X = gl.convert_layout(alpha_C, gl.SliceLayout(0, LL))
            l_chunk_XC = l_chunk_XC * gl.expand_dims(alpha_X, 0) + gl.convert_layout(sums, LL)
            o_chunk_LC = o_chunk_LC * gl.expand_dims(gl.convert_layout(alpha_C, OC), 0)
            m_chunk_C = m_new_C
            fence_async_shared()
            thread_barrier()
            o_chunk_LC = warpgroup_mma(values.permute((1, 0)), weights, o_chunk_LC, is_async=True)
            o_chunk_LC = warpgroup_mma_wait(0, deps=[o_chunk_LC])
            thread_barrier()
        total_C = gl.convert_layout(total(l_chunk_XC), SC)
        head_C = first_head + gl.arange(0, C, SC)
        h_O = first_head + gl.arange(0, C, gl.SliceLayout(0, OUT))
        l_O = gl.arange(0, LATENT, gl.SliceLayout(1, OUT))
        inside = gl.expand_dims(h_O < HEADS, 0) & (gl.expand_dims(l_O, 1) < LATENT)
        if SPLIT:
            row_C = (sequence * max_chunks + gl.program_id(2)) * HEADS
            gl.store(m_ptr + row_C + head_C, m_chunk_C, mask=head_C < HEADS)
            gl.store(l_ptr + row_C + head_C, total_C, mask=head_C < HEADS)
            o_ptrs = o_ptr + (row_C + gl.expand_dims(h_O, 0)) * LATENT + gl.expand_dims(l_O, 1)
            gl.store(o_ptrs, gl.convert_layout(o_chunk_LC, OUT), mask=inside)
        else:
            m_C, l_C, o_LC = _merge(m_C, l_C, o_LC, m_chunk_C, total_C, o_chunk_LC, OC)
            l_C = gl.where(num_keys > 0, l_C, 1.0)
            inverse_C = gl.div_rn(gl.full([C], 1.0, gl.float32, SC), l_C)
            o_LC = o_LC * gl.expand_dims(gl.convert_layout(inverse_C, OC), 0)
            rows = out_ptr + (sequence * HEADS + gl.expand_dims(h_O, 0)) * LATENT + gl.expand_dims(l_O, 1)
            gl.store(rows, gl.convert_layout(o_LC.to(gl.bfloat16), OUT), mask=inside)


WARPS, REGISTERS_BY_CHUNKS = 8, 128
LAYOUTS: dict[str, Any] = {  # of scores, output, codes, keys, the sums of classes, and what is stored
    "SL": gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, WARPS // 4], instr_shape=[16, 64 // WARPS, 16]),
    "OL": gl.NVMMADistributedLayout([3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 16, 16]),
    "VL": gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0]),
    "KL": gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0]),
    "LL": gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0]),
    "OUT": gl.BlockedLayout([8, 1], [32, 1], [2, WARPS // 2], [0, 1]),
}


def latent_decode_gluon(
    q_latent_BHC: Tensor,
    q_rotary_BHR: Tensor,
    latent_pages: Tensor,
    key_pages: Tensor,
    token_scale: Tensor,
    block_table_BP: Tensor,
    context_lens_B: Tensor,
    softmax_scale: float,
    out_BHC: Tensor,
    chunks: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Into `out_BHC` or, where `chunks` is given, m, l [B, S, H] and o [B, S, H, C] of each chunk into these. C = 512,
    R = 64, codes E4M3, BF16 keys and queries; pages of a multiple of 64 tokens."""
    (sequences, heads), page_size = q_latent_BHC.shape[:2], latent_pages.shape[1]
    m_BSH, l_BSH, o_BSHC = (out_BHC,) * 3 if chunks is None else chunks
    max_chunks = 1 if chunks is None else m_BSH.shape[1]
    _latent_decode_gluon_kernel[(triton.cdiv(heads, 16), sequences, max_chunks)](
        q_latent_BHC, q_rotary_BHR, latent_pages, key_pages, token_scale, out_BHC, block_table_BP, context_lens_B,
        m_BSH, l_BSH, o_BSHC, *q_latent_BHC.stride()[:2], *q_rotary_BHR.stride()[:2], block_table_BP.stride(0),
        max_chunks, softmax_scale * LOG2E, HEADS=heads, LATENT=LATENT_SIZE, ROTARY=ROTARY_SIZE, PAGE_SIZE=page_size,
        CHUNK=KV_CHUNK, SPLIT=chunks is not None, num_warps=WARPS,
        maxnreg=None if chunks is None else REGISTERS_BY_CHUNKS, enable_fp_fusion=False, **LAYOUTS,
    )  # fmt: skip
