"""What both kernels of `latent_backward_gluon.py` do with tiles: load, clear, multiply, store. In Gluon, for Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octetrl.kernels.gluon_compat import thread_barrier

ROWS = gl.constexpr(64)  # of a consumer
SEARCH = gl.constexpr(128)  # sequences that a program compares at a time when it searches for its own
ALIGN = gl.constexpr(4)  # as in attention_packed_backward.py
WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
CLEAR = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def mma_layout(columns: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def find_sequence(item, cu_seqlens_ptr, num_sequences, num_tokens, BLOCK: gl.constexpr):
    """As in attention_packed_backward.py."""
    sequence = 0
    for start in range(1, num_sequences + 1, SEARCH):
        b = start + gl.arange(0, SEARCH, LINE)
        first_B = gl.load(cu_seqlens_ptr + b, mask=b <= num_sequences, other=0)
        sequence += gl.sum(((b <= num_sequences) & (first_B // BLOCK + b <= item)).to(gl.int32), 0)
    first = gl.load(cu_seqlens_ptr + sequence)
    following = gl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < num_sequences, other=0)
    end = gl.where(sequence < num_sequences, following, num_tokens)
    return sequence, first, end - first, item - (first // BLOCK + sequence)


@gluon.jit
def _clear_rows(tile, left, COLUMNS: gl.constexpr, SIZE: gl.constexpr):
    """Set rows from `left` on to 0: what lies past the sequence may be NaN. Both consumers do so, with the same
    bytes."""
    for part in gl.static_range(SIZE // 16):
        rows = tile.slice(part * 16, 16, 0)
        row = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, CLEAR))
        rows.store(gl.where(gl.expand_dims(row < left, 1), rows.load(CLEAR), 0.0))


@gluon.jit
def clear_tile(tiles, stage, left, NOPE: gl.constexpr, ROTARY: gl.constexpr, VALUE: gl.constexpr, SIZE: gl.constexpr):
    _clear_rows(tiles[0].index(stage), left, NOPE, SIZE)
    _clear_rows(tiles[1].index(stage), left, ROTARY, SIZE)
    _clear_rows(tiles[2].index(stage), left, VALUE, SIZE)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def request(descs, columns, row, barrier, tiles, slot):
    """Begin to load one tile of each of three tensors."""
    SIZE: gl.constexpr = descs[0].block_type.nbytes + descs[1].block_type.nbytes + descs[2].block_type.nbytes
    mbarrier.expect(barrier, SIZE)
    tma.async_copy_global_to_shared(descs[0], [row, columns[0]], barrier, tiles[0].index(slot))
    tma.async_copy_global_to_shared(descs[1], [row, columns[1]], barrier, tiles[1].index(slot))
    tma.async_copy_global_to_shared(descs[2], [row, columns[2]], barrier, tiles[2].index(slot))


@gluon.jit
def store_rows(ptr, x, row, length, stride, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = x.type.layout
    offset = gl.expand_dims(row.to(gl.int64) * stride, 1) + gl.expand_dims(
        gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)), 0
    )
    gl.store(ptr + offset, x.to(gl.bfloat16), mask=gl.expand_dims(row < length, 1))


@gluon.jit
def scores(q_tiles, k_tiles, consumer, stage, COLUMNS: gl.constexpr):
    """S and dP of a tile, dP still in flight."""
    LAYOUT: gl.constexpr = mma_layout(COLUMNS)
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    s = warpgroup_mma(
        q_tiles[0].index(consumer), k_tiles[0].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma(q_tiles[1].index(consumer), k_tiles[1].index(stage).permute((1, 0)), s, is_async=True)
    dp = warpgroup_mma(
        q_tiles[2].index(consumer), k_tiles[2].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(1, deps=[s])
    return s, dp
