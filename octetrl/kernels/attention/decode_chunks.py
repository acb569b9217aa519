"""What decode does with whole chunks of keys: it stores and merges their results, and writes a head's output.

m, l and o are those of `attention_order`. A tile may have more columns than are different (`attention_decode.py`); the
copies are dropped here.

B queries, S chunks of the longest sequence, H query heads, D head size, C query columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.attention.attention_order import (
    CLASSES,
    LOWEST,
    SINK_SCALE,
    merge_columns,
    skipped_chunks,
    total_of_columns,
)
from octetrl.kernels.programmatic_launch import let_next_start
from octetrl.kernels.quantize.quantize_activation import block_scale, e4m3_byte, magnitude_bits

AHEAD = 16  # chunks that the merging kernel loads at a time


@triton.jit
def _kept_columns(x_RC, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEPT: tl.constexpr):
    """The first `KEPT` columns; the others are copies of these."""
    if KEPT == COLUMNS:
        return x_RC
    copy = tl.arange(0, COLUMNS // KEPT)[None, :, None]
    return tl.sum(tl.where(copy == 0, tl.reshape(x_RC, [ROWS, COLUMNS // KEPT, KEPT]), 0.0), 1)


@triton.jit
def whole_chunk(
    m_C, l_XC, o_DC, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """m, l [KEPT] and o [D, KEPT] of a chunk whose tiles are done."""
    m_1C = _kept_columns(tl.reshape(m_C, [1, COLUMNS]), 1, COLUMNS, KEPT)
    l_XC = _kept_columns(l_XC, CLASSES, COLUMNS, KEPT)
    o_DC = _kept_columns(o_DC, BLOCK_D, COLUMNS, KEPT)
    return tl.reshape(m_1C, [KEPT]), total_of_columns(l_XC, KEPT), o_DC


@triton.jit
def _store_quantized(
    out_DC, code_ptr, scale_ptr, offset_DC, scale_offset_C, own_C, POWER_OF_TWO: tl.constexpr
):  # fmt: skip
    """Store codes and scale of each column, which is one 1x128 block, from the BF16 rounding of the output."""
    x_DC = out_DC.to(tl.bfloat16).to(tl.float32)
    scale_C, inverse_C = block_scale(tl.max(magnitude_bits(x_DC), 0), POWER_OF_TWO)
    tl.store(code_ptr + offset_DC, e4m3_byte(x_DC * inverse_C[None, :]), mask=own_C[None, :])
    tl.store(scale_ptr + scale_offset_C, scale_C, mask=own_C)


@triton.jit
def store_out(
    l_C, o_DC, out_ptr, out_scale_ptr, v_scale_ptr, sequence, num_keys, kv_head, head_C, own_C,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, V_MODE: tl.constexpr,
    QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """The outputs of some heads of one kv head, from the total of all chunks. `sequence` and `num_keys`: one number, or
    one for each column."""
    d_D = tl.arange(0, BLOCK_D)
    out_scale = 1.0
    if V_MODE == 1:
        out_scale = tl.load(v_scale_ptr + kv_head)
    l_safe_C = tl.where(num_keys > 0, l_C, 1.0)  # a padding sequence gives zeros; NaN stays NaN
    out_DC = o_DC * tl.div_rn(tl.zeros_like(l_C) + out_scale, l_safe_C)[None, :]
    out_offset_DC = (sequence * HEADS + head_C)[None, :] * HEAD_SIZE + d_D[:, None]
    if QUANTIZE:
        scale_offset_C = head_C * tl.num_programs(1) + sequence
        _store_quantized(out_DC, out_ptr, out_scale_ptr, out_offset_DC, scale_offset_C, own_C, POWER_OF_TWO)
    else:
        own_DC = own_C[None, :] & (d_D < HEAD_SIZE)[:, None]
        tl.store(out_ptr + out_offset_DC, out_DC.to(out_ptr.dtype.element_ty), mask=own_DC)


@triton.jit
def store_chunk(
    m_C, l_C, o_DC, m_ptr, l_ptr, o_ptr, place, place_C, own_C, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """m, l [B, S, H] and o [B, S, H, D] of one chunk. place + place_C: a column's index in m; own_C: if it has one."""
    d_D = tl.arange(0, BLOCK_D)
    own_DC = own_C[None, :] & (d_D < HEAD_SIZE)[:, None]
    tl.store(m_ptr + place + place_C, m_C, mask=own_C)
    tl.store(l_ptr + place + place_C, l_C, mask=own_C)
    tl.store(o_ptr + (place + place_C)[None, :] * HEAD_SIZE + d_D[:, None], o_DC, mask=own_DC)


@triton.jit(do_not_specialize=["max_chunks"])
def _attention_merge_kernel(
    m_ptr, l_ptr, o_ptr, out_ptr, out_scale_ptr, contexts_ptr, v_scale_ptr, max_chunks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    AHEAD: tl.constexpr, V_MODE: tl.constexpr, QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    WINDOW: tl.constexpr, EARLY: tl.constexpr, sink_ptr,
):  # fmt: skip
    """Output of one sequence and head from its chunks; `AHEAD` chunks are loaded at a time."""
    let_next_start(EARLY)
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    num_keys = tl.load(contexts_ptr + sequence)
    num_chunks = (num_keys + CHUNK - 1) // CHUNK
    d_D = tl.arange(0, BLOCK_D)
    row = sequence * max_chunks * HEADS + head
    m_C = tl.full([1], LOWEST, tl.float32)
    l_C = tl.zeros([1], tl.float32)
    if sink_ptr is not None:
        m_C = tl.zeros([1], tl.float32) + tl.load(sink_ptr + head).to(tl.float32) * SINK_SCALE
        l_C = tl.full([1], 1.0, tl.float32)
    o_DC = tl.zeros([BLOCK_D, 1], tl.float32)
    for first in tl.range(skipped_chunks(num_keys, WINDOW, CHUNK), num_chunks, AHEAD, num_stages=1):
        for ahead in tl.static_range(AHEAD):  # past the last chunk: a merge that changes nothing
            chunk = first + ahead + tl.arange(0, 1)
            there_C = chunk < num_chunks
            row_C = row + chunk * HEADS
            m_chunk_C = tl.load(m_ptr + row_C, mask=there_C, other=LOWEST)
            l_chunk_C = tl.load(l_ptr + row_C, mask=there_C, other=0.0)
            there_DC = there_C[None, :] & (d_D < HEAD_SIZE)[:, None]
            o_chunk_DC = tl.load(o_ptr + row_C[None, :] * HEAD_SIZE + d_D[:, None], mask=there_DC, other=0.0)
            m_C, l_C, o_DC = merge_columns(m_C, l_C, o_DC, m_chunk_C, l_chunk_C, o_chunk_DC)
    store_out(
        l_C, o_DC, out_ptr, out_scale_ptr, v_scale_ptr, sequence, num_keys, head // GROUP, head + tl.arange(0, 1),
        tl.arange(0, 1) == 0, HEADS, HEAD_SIZE, BLOCK_D, V_MODE, QUANTIZE, POWER_OF_TWO,
    )  # fmt: skip


def chunk_results(q_BHD: Tensor, max_chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for m and l [B, S, H] and o [B, S, H, D] of every chunk, in float32."""
    B, H, D = q_BHD.shape
    m_BSH, l_BSH = torch.empty(2, B, max_chunks, H, device=q_BHD.device).unbind()
    return m_BSH, l_BSH, torch.empty(B, max_chunks, H, D, device=q_BHD.device)
