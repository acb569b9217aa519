"""MLA's packed forward in Gluon, for latents of 512 elements: one launch computes whole rows.

`latent_rows.py` has the formula and the order of sums, and calls this. Its kernel computes one half of the columns in a
launch, and thus the scores twice. Here a program computes the scores of its 64 rows once, each of two warpgroups for
half of a tile's keys, and then all 512 columns of the output, each warpgroup half of them. The total of earlier chunks
is touched once in 16 tiles; the compiler keeps it in local memory.

Latents and rotary keys of the next tile are copied to shared memory while this one is multiplied. When a tile's rotary
keys have been read, its weights P take their place. Both products read shared memory.

R rows, N keys of a tile, X classes, L latent elements. Written for Gluon of Triton 3.6.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from octetrl.kernels.attention.attention_order import FLOOR, KV_CHUNK, LOG2E
from octetrl.kernels.gluon_compat import thread_barrier

LATENT_SIZE, ROTARY_SIZE = 512, 64  # what it is written for
LOWEST = gl.constexpr(FLOOR)
N = gl.constexpr(64)
ROWS = gl.constexpr(64)


@gluon.jit
def _copy_tile(
    values, keys, latent_ptr, key_ptr, base, start, num_keys, LATENT: gl.constexpr, ROTARY: gl.constexpr,
    VL: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile's latents and keys, zeros where there is no key."""
    n = gl.arange(0, N, gl.SliceLayout(1, VL))
    there = gl.expand_dims(start + n < num_keys, 1)
    c = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(0, VL)), 0)
    k = gl.expand_dims(gl.arange(0, ROTARY, gl.SliceLayout(0, VL)), 0)
    row = base + start
    value_ptrs = latent_ptr + row * LATENT + gl.expand_dims(n, 1) * LATENT + c
    key_ptrs = key_ptr + row * ROTARY + gl.expand_dims(n, 1) * ROTARY + k
    async_copy.async_copy_global_to_shared(values, value_ptrs, mask=there & (c < LATENT))
    async_copy.async_copy_global_to_shared(keys, key_ptrs, mask=there & (k < ROTARY))
    async_copy.commit_group()


@gluon.jit
def _total_of_rows(l_RX):
    """Neighbours first, then pairs of pairs: [R, 16] to [R]."""
    l_RX = gl.sum(gl.reshape(l_RX, [ROWS, 8, 2]), 2)
    l_RX = gl.sum(gl.reshape(l_RX, [ROWS, 4, 2]), 2)
    l_RX = gl.sum(gl.reshape(l_RX, [ROWS, 2, 2]), 2)
    return gl.sum(l_RX, 1)


@gluon.jit
def _merge(m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, SR: gl.constexpr, OR: gl.constexpr):
    """The total with one more chunk, as `merge_rows`."""
    m_new_R = gl.maximum(m_R, m_chunk_R)
    before_R = gl.exp2(m_R - m_new_R)
    here_R = gl.exp2(m_chunk_R - m_new_R)
    l_R = gl.fma(gl.convert_layout(_total_of_rows(l_chunk_RX), SR), here_R, l_R * before_R)
    here_RL, _ = gl.broadcast(gl.expand_dims(gl.convert_layout(here_R, OR), 1), o_RL)
    o_RL = gl.fma(o_chunk_RL, here_RL, o_RL * gl.expand_dims(gl.convert_layout(before_R, OR), 1))
    return m_new_R, l_R, o_RL


@gluon.jit
def _latent_rows_gluon_kernel(
    q_latent_ptr, q_rotary_ptr, latent_ptr, key_ptr, out_ptr, cu_seqlens_ptr,
    stride_ql_token, stride_ql_head, stride_qr_token, stride_qr_head, stride_out_token, stride_out_head, score_scale,
    HEADS: gl.constexpr, LATENT: gl.constexpr, ROTARY: gl.constexpr, CHUNK: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr, VL: gl.constexpr, LL: gl.constexpr,
):  # fmt: skip
    SR: gl.constexpr = gl.SliceLayout(1, SL)
    OR: gl.constexpr = gl.SliceLayout(1, OL)
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    block = gl.num_programs(0) - 1 - gl.program_id(0)  # the rows with the most keys start first
    sequence = gl.program_id(1)
    first_query = gl.load(cu_seqlens_ptr + sequence)
    num_keys = gl.load(cu_seqlens_ptr + sequence + 1) - first_query
    if block * ROWS < num_keys * HEADS:
        base = first_query.to(gl.int64)
        end = gl.minimum(num_keys, (block * ROWS + ROWS - 1) // HEADS + 1)
        values = gl.allocate_shared_memory(gl.bfloat16, [2, N, LATENT], WIDE)
        keys = gl.allocate_shared_memory(gl.bfloat16, [2, N, ROTARY], WIDE)
        q_latent = gl.allocate_shared_memory(gl.bfloat16, [ROWS, LATENT], WIDE)
        q_rotary = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROTARY], WIDE)
        _copy_tile(values.index(0), keys.index(0), latent_ptr, key_ptr, base, 0, num_keys, LATENT, ROTARY, VL)
        row_V = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, VL))
        inside_V = gl.expand_dims(row_V < num_keys * HEADS, 1)
        token_V, head_V = base + row_V // HEADS, row_V % HEADS
        c = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(0, VL)), 0)
        k = gl.expand_dims(gl.arange(0, ROTARY, gl.SliceLayout(0, VL)), 0)
        ql_ptrs = q_latent_ptr + gl.expand_dims(token_V * stride_ql_token + head_V * stride_ql_head, 1) + c
        qr_ptrs = q_rotary_ptr + gl.expand_dims(token_V * stride_qr_token + head_V * stride_qr_head, 1) + k
        q_latent.store(gl.load(ql_ptrs, mask=inside_V & (c < LATENT), other=0.0))
        q_rotary.store(gl.load(qr_ptrs, mask=inside_V & (k < ROTARY), other=0.0))
        position_R = (block * ROWS + gl.arange(0, ROWS, SR)) // HEADS
        zero = gl.zeros([ROWS, N], gl.float32, SL)
        m_R = gl.full([ROWS], LOWEST, gl.float32, SR)
        l_R = gl.zeros([ROWS], gl.float32, SR)
        o_RL = gl.zeros([ROWS, LATENT], gl.float32, OL)
        m_chunk_R = gl.full([ROWS], LOWEST, gl.float32, SR)
        l_chunk_RX = gl.zeros([ROWS, 16], gl.float32, LL)
        o_chunk_RL = gl.zeros([ROWS, LATENT], gl.float32, OL)
        for start in range(0, end, N):
            slot = start // N % 2
            next_values, next_keys = values.index(1 - slot), keys.index(1 - slot)
            _copy_tile(next_values, next_keys, latent_ptr, key_ptr, base, start + N, end, LATENT, ROTARY, VL)
            async_copy.wait_group(1)
            fence_async_shared()
            thread_barrier()
            s_RN = warpgroup_mma(q_latent, values.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            s_RN = warpgroup_mma(q_rotary, keys.index(slot).permute((1, 0)), s_RN, is_async=True)
            s_RN = warpgroup_mma_wait(0, deps=[s_RN])
            key_N = start + gl.arange(0, N, gl.SliceLayout(0, SL))
            there_RN = gl.expand_dims(position_R, 1) >= gl.expand_dims(key_N, 0)
            s_RN = gl.where(there_RN, s_RN * score_scale, float("-inf"))
            if start % CHUNK == 0 and start > 0:
                m_R, l_R, o_RL = _merge(m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, SR, OR)
                m_chunk_R = gl.full([ROWS], LOWEST, gl.float32, SR)
            m_new_R = gl.maximum(m_chunk_R, gl.max(s_RN, 1))
            alpha_R = gl.exp2(m_chunk_R - m_new_R)
            p_RN = gl.exp2(s_RN - gl.expand_dims(m_new_R, 1))
            thread_barrier()
            keys.index(slot).store(p_RN.to(gl.bfloat16))  # the keys have been read; P takes their place
            sums = gl.sum(gl.reshape(p_RN, [ROWS, 4, 2, 8]), 2)
            sums = gl.sum(gl.reshape(sums, [ROWS, 16, 2]), 2)
            alpha_X = gl.convert_layout(alpha_R, gl.SliceLayout(1, LL))
            l_chunk_RX = l_chunk_RX * gl.expand_dims(alpha_X, 1) + gl.convert_layout(sums, LL)
            o_chunk_RL = o_chunk_RL * gl.expand_dims(gl.convert_layout(alpha_R, OR), 1)
            m_chunk_R = m_new_R
            fence_async_shared()
            thread_barrier()
            o_chunk_RL = warpgroup_mma(keys.index(slot), values.index(slot), o_chunk_RL, is_async=True)
            o_chunk_RL = warpgroup_mma_wait(0, deps=[o_chunk_RL])
            thread_barrier()
        async_copy.wait_group(0)
        m_R, l_R, o_RL = _merge(m_R, l_R, o_RL, m_chunk_R, l_chunk_RX, o_chunk_RL, SR, OR)
        inverse_R = gl.div_rn(gl.full([ROWS], 1.0, gl.float32, SR), l_R)
        o_RL = o_RL * gl.expand_dims(gl.convert_layout(inverse_R, OR), 1)
        row_O = block * ROWS + gl.arange(0, ROWS, OR)
        l_O = gl.expand_dims(gl.arange(0, LATENT, gl.SliceLayout(0, OL)), 0)
        out_row = (base + row_O // HEADS) * stride_out_token + row_O % HEADS * stride_out_head
        inside = gl.expand_dims(row_O < num_keys * HEADS, 1) & (l_O < LATENT)
        gl.store(out_ptr + gl.expand_dims(out_row, 1) + l_O, o_RL.to(gl.bfloat16), mask=inside)


LAYOUTS: dict[str, Any] = {  # of scores, output, what is loaded, and the sums of classes
    "SL": gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]),
    "OL": gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16]),
    "VL": gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]),
    "LL": gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]),
}


def latent_rows_gluon(
    q_latent_THC: Tensor,
    q_rotary_THR: Tensor,
    value_TC: Tensor,
    key_TR: Tensor,
    cu_seqlens_B1: Tensor,
    max_query_len: int,
    softmax_scale: float,
    out_THC: Tensor,
) -> None:
    """Packed BF16 sequences of C = 512, R = 64 into `out_THC`; rows outside every sequence are left as they are."""
    heads = q_latent_THC.shape[1]
    _latent_rows_gluon_kernel[(triton.cdiv(max_query_len * heads, 64), cu_seqlens_B1.numel() - 1)](
        q_latent_THC, q_rotary_THR, value_TC, key_TR, out_THC, cu_seqlens_B1,
        *q_latent_THC.stride()[:2], *q_rotary_THR.stride()[:2], *out_THC.stride()[:2], softmax_scale * LOG2E,
        HEADS=heads, LATENT=LATENT_SIZE, ROTARY=ROTARY_SIZE, CHUNK=KV_CHUNK, num_warps=8, enable_fp_fusion=False,
        **LAYOUTS,
    )  # fmt: skip
