"""The feeders of attention in Gluon: warpgroups that load tiles of K and V, convert codes and load scales.

`attention_rows_gluon.py` explains the rings. A page of codes comes by TMA as words of four codes, and two words of two
operands take its place. The scales of tokens are loaded through pointers, one for each thread.

T tokens, K kv heads, N keys of a tile, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octetrl.fp8.format import is_code
from octetrl.kernels.attention.attention_order import KV_TILE
from octetrl.kernels.instructions import E4M3_TO_BF16, E4M3_TO_FP16, INT8_BASE, INT8_TO_BF16

HEAD_SIZE = 128  # what it is written for
N = gl.constexpr(KV_TILE)
D = gl.constexpr(HEAD_SIZE)
ROWS = gl.constexpr(64)  # of a consumer; a program has two
PART = gl.constexpr(32)  # rows of a tile of codes that are converted at a time
WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
WORDS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
KEYS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def tiles_of(sizes):
    """(the first tile that needs a mask, the number of tiles) of a program."""
    _, _, _, num_queries, num_keys, block = sizes
    before = num_keys - num_queries + block * (2 * ROWS)  # position of the program's first query
    inside = block * (2 * ROWS) < num_queries
    end = gl.where(inside, gl.cdiv(gl.minimum(num_keys, before + 2 * ROWS), N), 0)
    return gl.maximum(gl.minimum((before + 1) // N, end), 0), end


@gluon.jit
def _convert(codes, operand, left, WAY: gl.constexpr, MASKED: gl.constexpr):
    """A tile of codes, as words [128, 32] of four, into the operand dtype, as words [128, 64] of two. With `MASKED` the
    columns from `left` on become 0."""
    word = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, WORDS_LAYOUT)), 0)
    for part in gl.static_range(128 // PART):
        four = codes.slice(part * PART, PART, 0).load(WORDS_LAYOUT)
        if MASKED:
            kept = left - 4 * word
            bits = (1 << (8 * gl.minimum(gl.maximum(kept, 0), 3))) - 1
            four = four & gl.where(kept >= 4, -1, bits)
        first, second = gl.inline_asm_elementwise(
            WAY, "=r,=r,r,r", [four, INT8_BASE], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        operand.slice(part * PART, PART, 0).store(gl.reshape(gl.join(first, second), [PART, 64]))


@gluon.jit
def _request(desc, matrix, ready, ring, slot, more):
    """Begin to load a page of codes."""
    mbarrier.expect(ready.index(slot), N * D, pred=more)
    tma.async_copy_global_to_shared(desc, [matrix * 128, 0], ready.index(slot), ring.index(slot), pred=more)


@gluon.jit
def _feed_tile(
    tile, row, column, scale_N, desc, ring, full, empty, scale_ring, codes, ready, matrix, left, more,
    SCALES: gl.constexpr, WAY: gl.constexpr, IS_V: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One tile of K or V, with its scales. `WAY`: how words of codes are converted; None: they are operands already.
    `matrix`: the page that is requested next if there are `more`; `left`: keys from here to the sequence's end."""
    stage = tile % STAGES
    slot = tile % AHEAD
    mbarrier.wait(empty.index(stage), (tile // STAGES & 1) ^ 1)
    arrived = full.index(stage)
    if WAY is None:
        mbarrier.expect(arrived, N * D * 2)
        tma.async_copy_global_to_shared(desc, [row, column], arrived, ring.index(stage))
    else:
        mbarrier.wait(ready.index(slot), tile // AHEAD & 1)
        if IS_V:
            if left < N:  # what lies past the context may be NaN
                _convert(codes.index(slot), ring.index(stage), left, WAY, True)
            else:
                _convert(codes.index(slot), ring.index(stage), left, WAY, False)
        else:
            _convert(codes.index(slot), ring.index(stage), left, WAY, False)
        fence_async_shared()
    if SCALES:
        scale_ring.index(stage).store(scale_N)
    if SCALES or WAY is not None:
        mbarrier.arrive(arrived, count=1)
    if WAY is not None:
        _request(desc, matrix, ready, codes, slot, more)


@gluon.jit
def feed(
    descs, scale_ptrs, table_ptr, strides, base_scale, rings, words, codes, sizes,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, K_MODE: gl.constexpr, V_MODE: gl.constexpr, K_WAY: gl.constexpr,
    V_WAY: gl.constexpr, FEED_K: gl.constexpr, FEED_V: gl.constexpr, PAGED: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """A warpgroup that loads tiles of K, V or both, converts codes and loads scales."""
    _, _, k_scale_ring, v_scale_ring, k_full, v_full, k_empty, v_empty = rings
    k_desc, v_desc = descs
    k_scale_ptr, v_scale_ptr = scale_ptrs
    k_words, v_words = words
    k_codes, v_codes, k_ready, v_ready = codes
    head, sequence, first, _, num_keys, _ = sizes
    stride_table, stride_scale_token, stride_scale_head = strides
    kv_head = head // GROUP
    _, end = tiles_of(sizes)
    n_N = gl.arange(0, N, KEYS_LAYOUT)
    K_CONVERTED: gl.constexpr = FEED_K and K_WAY is not None
    V_CONVERTED: gl.constexpr = FEED_V and V_WAY is not None
    page, coming = first, first
    if PAGED:
        table_ptr += sequence.to(gl.int64) * stride_table
        page = gl.load(table_ptr, mask=end > 0, other=0)
    if K_CONVERTED or V_CONVERTED:
        for tile in gl.static_range(AHEAD):
            matrix = gl.load(table_ptr + tile, mask=tile < end, other=0) * KV_HEADS + kv_head
            if K_CONVERTED:
                _request(k_desc, matrix, k_ready, k_codes, tile, tile < end)
            if V_CONVERTED:
                _request(v_desc, matrix, v_ready, v_codes, tile, tile < end)
    for tile in range(0, end):
        start = tile * N
        more = tile + AHEAD < end
        if PAGED:
            row, column = (page * KV_HEADS + kv_head) * N, 0  # one page of one head
            scale_N = row.to(gl.int64) + n_N
            page = gl.load(table_ptr + tile + 1, mask=tile + 1 < end, other=0)
            if K_CONVERTED or V_CONVERTED:
                coming = gl.load(table_ptr + tile + AHEAD, mask=more, other=0) * KV_HEADS + kv_head
        else:
            row, column = first + start, kv_head * D
            scale_N = (row + n_N).to(gl.int64) * stride_scale_token + kv_head * stride_scale_head
        k_scale_N, v_scale_N = base_scale, base_scale
        if FEED_K and K_MODE == 2:
            k_scale_N = gl.load(k_scale_ptr + scale_N, mask=start + n_N < num_keys, other=0.0) * base_scale
        if FEED_V and V_MODE == 2:
            v_scale_N = gl.load(v_scale_ptr + scale_N, mask=start + n_N < num_keys, other=0.0)
        if FEED_K:
            _feed_tile(
                tile, row, column, k_scale_N, k_desc, k_words, k_full, k_empty, k_scale_ring, k_codes, k_ready, coming,
                num_keys - start, more, K_MODE == 2, K_WAY, False, STAGES, AHEAD,
            )  # fmt: skip
        if FEED_V:
            _feed_tile(
                tile, row, column, v_scale_N, v_desc, v_words, v_full, v_empty, v_scale_ring, v_codes, v_ready, coming,
                num_keys - start, more, V_MODE == 2, V_WAY, True, STAGES, AHEAD,
            )  # fmt: skip


def tile_descriptor(x: Tensor, paged: bool) -> TensorDescriptor:
    """Packed K or V [T, K, D], or pages, by tiles of one head; codes as words of four."""
    if is_code(x.dtype):
        return TensorDescriptor(x.view(torch.int32), [x.numel() // 128, 32], [32, 1], [128, 32], WORDS.value)
    if paged:
        return TensorDescriptor(x, [x.numel() // 128, 128], [128, 1], [128, 128], WIDE.value)
    tokens, heads, _ = x.shape
    return TensorDescriptor(x, [tokens, heads * HEAD_SIZE], [x.stride(0), 1], [KV_TILE, HEAD_SIZE], WIDE.value)


def conversion(x: Tensor, operand: torch.dtype) -> str | None:
    """How words of codes are converted."""
    if not is_code(x.dtype):
        return None
    if x.dtype == torch.int8:
        return INT8_TO_BF16.value
    return E4M3_TO_BF16.value if operand == torch.bfloat16 else E4M3_TO_FP16.value
