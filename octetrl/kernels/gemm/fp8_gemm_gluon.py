"""The block-scaled FP8 GEMM in Gluon, for few rows. fp8_gemm.py has the formula and the order of sums, and calls it.

Programs are persistent. In each, one warp loads and one or two warpgroups (consumers) multiply, 64 rows of y each.

The loading warp fills a ring of S stages by TMA. A stage holds 64 x 128 codes of x and 64 scales for each consumer, and
tile_n x 128 codes of w. The loading warp starts on the next tile while the consumers finish and store the current one,
so memory is never idle between tiles. `full` and `empty` are the ring's barriers, one pair for each stage. Each turn of
the ring flips their phase.

A consumer processes two blocks of K in an iteration and has no wgmma in flight when the loop repeats. Otherwise ptxas
would serialise all of them. K must therefore be a multiple of 256. Each block is its own wgmma group, starts from zero
and enters the accumulator by one fma, K ascending. The tensor core never adds across blocks.

TMA fills loads beyond x's rows with zeros. Scales lie in one line [K/128 * stride], so the last tile reads its
neighbours' scales there, for rows that are never stored.

M rows, N columns, K depth of the GEMM. Written for Gluon of Triton 3.6.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gluon import multiprocessors

ROWS = gl.constexpr(64)  # rows of x and y for each consumer
BLOCK = gl.constexpr(128)
PRODUCER_REGISTERS, CONSUMER_REGISTERS = gl.constexpr(24), gl.constexpr(232)
CODES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
SCALE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
RING_LIMIT = 225 * 1024  # largest shared memory of the ring, in bytes


@gluon.jit
def _tile_start(
    tile: gl.tensor, num_rows: gl.tensor, num_columns: gl.tensor,
    BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, GROUP: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:  # fmt: skip
    """First row and column of a tile. GROUP tiles along M come before the next tile along N."""
    tiles_m, tiles_n = gl.cdiv(num_rows, ROWS * CONSUMERS), gl.cdiv(num_columns, BLOCK_N)
    width = GROUP * tiles_n
    first_m = tile // width * GROUP
    members = gl.minimum(tiles_m - first_m, GROUP)
    inside = tile % width
    return (first_m + inside % members) * ROWS * CONSUMERS, inside // members * BLOCK_N


@gluon.jit
def _produce(
    descs: gl.tuple, scale_stride: gl.tensor, rings: gl.tuple, sizes: gl.tuple,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GROUP: gl.constexpr,
) -> None:  # fmt: skip
    """The loading warp."""
    x_desc, w_desc, x_scale_desc = descs
    x_ring, w_ring, scale_ring, full, empty = rings
    num_rows, num_columns, num_blocks, num_tiles = sizes
    done = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = _tile_start(tile, num_rows, num_columns, BLOCK_N, CONSUMERS, GROUP)
        for block in range(num_blocks):
            stage = (done + block) % STAGES
            mbarrier.wait(empty.index(stage), ((done + block) // STAGES & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, CONSUMERS * ROWS * (BLOCK + 4) + BLOCK_N * BLOCK)
            tma.async_copy_global_to_shared(w_desc, [column, block * BLOCK], arrived, w_ring.index(stage))
            for i in gl.static_range(CONSUMERS):
                part = stage * CONSUMERS + i
                first = row + i * ROWS
                tma.async_copy_global_to_shared(x_desc, [first, block * BLOCK], arrived, x_ring.index(part))
                tma.async_copy_global_to_shared(
                    x_scale_desc, [block * scale_stride + first], arrived, scale_ring.index(part)
                )
        done += num_blocks


@gluon.jit
def _consume(
    y_ptr: gl.tensor, w_scale_ptr: gl.tensor, rings: gl.tuple, sizes: gl.tuple,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GROUP: gl.constexpr,
) -> None:  # fmt: skip
    """A multiplying warpgroup: computes rows CONSUMER * 64 to CONSUMER * 64 + 63 of every tile."""
    x_ring, w_ring, scale_ring, full, empty = rings
    num_rows, num_columns, num_blocks, num_tiles = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
    done = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = _tile_start(tile, num_rows, num_columns, BLOCK_N, CONSUMERS, GROUP)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, layout)
        scale_ptr = w_scale_ptr + column // BLOCK * num_blocks
        w_scale_0, w_scale_1 = gl.load(scale_ptr), gl.load(scale_ptr + 1)
        for block in range(0, num_blocks, 2):
            at_0, at_1 = done + block, done + block + 1
            stage_0, stage_1 = at_0 % STAGES, at_1 % STAGES
            part_0, part_1 = stage_0 * CONSUMERS + CONSUMER, stage_1 * CONSUMERS + CONSUMER
            mbarrier.wait(full.index(stage_0), at_0 // STAGES & 1)
            w_KN = w_ring.index(stage_0).permute((1, 0))
            sum_0 = warpgroup_mma(x_ring.index(part_0), w_KN, zero, use_acc=False, is_async=True)
            mbarrier.wait(full.index(stage_1), at_1 // STAGES & 1)
            w_KN = w_ring.index(stage_1).permute((1, 0))
            sum_1 = warpgroup_mma(x_ring.index(part_1), w_KN, zero, use_acc=False, is_async=True)
            more = block + 2 < num_blocks
            next_0 = gl.load(scale_ptr + block + 2, mask=more, other=0.0)
            next_1 = gl.load(scale_ptr + block + 3, mask=more, other=0.0)
            scale_0 = scale_ring.index(part_0).load(row_layout) * w_scale_0
            scale_1 = scale_ring.index(part_1).load(row_layout) * w_scale_1
            sum_0 = warpgroup_mma_wait(1, deps=[sum_0])
            mbarrier.arrive(empty.index(stage_0), count=1)
            acc = gl.fma(sum_0, gl.expand_dims(scale_0, 1), acc)
            sum_1 = warpgroup_mma_wait(0, deps=[sum_1])
            mbarrier.arrive(empty.index(stage_1), count=1)
            acc = gl.fma(sum_1, gl.expand_dims(scale_1, 1), acc)
            w_scale_0, w_scale_1 = next_0, next_1
        done += num_blocks
        row_M = gl.expand_dims(row + CONSUMER * ROWS + gl.arange(0, ROWS, row_layout), 1)
        column_N = gl.expand_dims(column + gl.arange(0, BLOCK_N, column_layout), 0)
        inside_MN = (row_M < num_rows) & (column_N < num_columns)
        gl.store(y_ptr + row_M.to(gl.int64) * num_columns + column_N, acc.to(gl.bfloat16), mask=inside_MN)


@gluon.jit(do_not_specialize=["num_rows", "num_blocks", "scale_stride", "num_tiles"])
def _fp8_gemm_gluon_kernel(
    x_desc: gl.tensor, w_desc: gl.tensor, x_scale_desc: gl.tensor, y_ptr: gl.tensor, w_scale_ptr: gl.tensor,
    num_rows: gl.tensor, num_columns: gl.tensor, num_blocks: gl.tensor, scale_stride: gl.tensor, num_tiles: gl.tensor,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GROUP: gl.constexpr,
) -> None:  # fmt: skip
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * CONSUMERS, ROWS, BLOCK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK], w_desc.layout)
    scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS, ROWS], x_scale_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    descs = (x_desc, w_desc, x_scale_desc)
    rings = (x_ring, w_ring, scale_ring, full, empty)
    sizes = (num_rows, num_columns, num_blocks, num_tiles)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (y_ptr, w_scale_ptr, rings, sizes, gl.constexpr(0), BLOCK_N, STAGES, CONSUMERS, GROUP)),
                (_produce, (descs, scale_stride, rings, sizes, BLOCK_N, STAGES, CONSUMERS, GROUP)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (y_ptr, w_scale_ptr, rings, sizes, gl.constexpr(0), BLOCK_N, STAGES, CONSUMERS, GROUP)),
                (_consume, (y_ptr, w_scale_ptr, rings, sizes, gl.constexpr(1), BLOCK_N, STAGES, CONSUMERS, GROUP)),
                (_produce, (descs, scale_stride, rings, sizes, BLOCK_N, STAGES, CONSUMERS, GROUP)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def ring_bytes(tile_m: int, tile_n: int, stages: int) -> int:
    """Shared memory of a ring, in bytes."""
    return stages * ((tile_m + tile_n) * 128 + tile_m * 4)


def fp8_gemm_gluon(
    x: Quantized, w: Quantized, scale_stride: int, tile_m: int, tile_n: int, stages: int, group: int = 1
) -> Tensor:
    """y[M, N] in BF16. Operands and `scale_stride` are those of `check_operands`. tile_m: 64 or 128; tile_n: a divisor
    of 128.

    Raises ValueError for a K that is not a multiple of 256, a `scale_stride` that is not a multiple of 4 (TMA would
    fault), or a ring that does not fit.
    """
    (m, k), n = x.codes.shape, w.codes.shape[0]
    if k % 256:
        raise ValueError(f"the Gluon kernel takes two blocks of K at a time: {k} is not a multiple of 256")
    if scale_stride % 4:
        raise ValueError(f"the Gluon kernel needs a scale stride that is a multiple of 4, not {scale_stride}")
    if ring_bytes(tile_m, tile_n, stages) > RING_LIMIT:
        raise ValueError(f"{stages} stages of {tile_m}x{tile_n} do not fit in shared memory")
    assert tile_m in (64, 128) and 128 % tile_n == 0, f"tile {tile_m}x{tile_n}"
    y_MN = torch.empty(m, n, dtype=torch.bfloat16, device=x.codes.device)
    if m == 0:
        return y_MN
    blocks = k // 128
    tiles = triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n)
    _fp8_gemm_gluon_kernel[(min(tiles, multiprocessors(x.codes.device)),)](
        TensorDescriptor(x.codes, [m, k], [k, 1], [64, 128], CODES_LAYOUT),
        TensorDescriptor(w.codes, [n, k], [k, 1], [tile_n, 128], CODES_LAYOUT),
        TensorDescriptor(x.scale, [(blocks - 1) * scale_stride + m], [1], [64], SCALE_LAYOUT),
        y_MN, w.scale, m, n, blocks, scale_stride, tiles,
        BLOCK_N=tile_n, STAGES=stages, CONSUMERS=tile_m // 64, GROUP=group, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y_MN
