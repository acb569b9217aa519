"""The grouped FP8 GEMM in Gluon, for experts of many rows. grouped_fp8_gemm.py has the formula, and calls it.

It is fp8_gemm_gluon.py's loop over tiles of 128 rows and 128 columns: in each persistent program one warp loads, and
two warpgroups (consumers) multiply 64 rows each, two blocks of K in an iteration. It differs in four things.

- A tile's expert and rows stand in `owner_O3`, which a consumer reads one tile ahead.
- An expert's rows begin anywhere, and TMA reads a line of scales only from multiples of 16 bytes. So consumers load x's
  scales themselves, one iteration ahead.
- y goes through shared memory, so that a thread stores 16 bytes of a row instead of 4: 5 to 40% faster, because these
  products have few blocks of K for each tile that they store.
- If the number of blocks is odd (`ODD`), the last one comes after the loop, alone.

TMA reads the next expert's rows beyond the end of an expert's, and zeros beyond x; those rows are never stored.

M rows, N columns, K depth of a tile. Written for Gluon of Triton 3.6.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.fp8_gemm_gluon import (
    BLOCK,
    CODES_LAYOUT,
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
)
from octetrl.kernels.gluon import multiprocessors

CONSUMERS = gl.constexpr(2)
STAGES = 6  # of 32 KB
STORE_LAYOUT = gl.constexpr(gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes of y a thread


@gluon.jit
def _owner(owner_ptr: gl.tensor, tile: gl.tensor, num_tiles: gl.tensor, tiles_n: gl.tensor) -> gl.tuple:
    """A tile's expert, first row, and the end of its expert's rows; no rows if there is no such tile."""
    owner_ptr += tile // tiles_n * 3
    inside = tile < num_tiles
    expert, row = gl.load(owner_ptr, mask=inside, other=0), gl.load(owner_ptr + 1, mask=inside, other=0)
    return expert, row, gl.load(owner_ptr + 2, mask=inside, other=0)


@gluon.jit
def _produce(
    x_desc: gl.tensor, w_desc: gl.tensor, owner_ptr: gl.tensor, rings: gl.tuple, sizes: gl.tuple, steps: gl.tuple,
    STAGES: gl.constexpr,
) -> None:  # fmt: skip
    """The loading warp."""
    x_ring, w_ring, full, empty = rings
    num_columns, num_blocks, num_tiles = sizes
    row_step, block_step = steps
    tiles_n = num_columns // BLOCK
    done = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, row, end = _owner(owner_ptr, tile, num_tiles, tiles_n)
        if row < end:
            w_row, w_block = expert * row_step + tile % tiles_n * BLOCK, expert * block_step
            for block in range(num_blocks):
                stage = (done + block) % STAGES
                mbarrier.wait(empty.index(stage), ((done + block) // STAGES & 1) ^ 1)
                arrived = full.index(stage)
                mbarrier.expect(arrived, (CONSUMERS * ROWS + BLOCK) * BLOCK)
                tma.async_copy_global_to_shared(
                    w_desc, [w_row, (w_block + block) * BLOCK], arrived, w_ring.index(stage)
                )
                for i in gl.static_range(CONSUMERS):
                    part = x_ring.index(stage * CONSUMERS + i)
                    tma.async_copy_global_to_shared(x_desc, [row + i * ROWS, block * BLOCK], arrived, part)
            done += num_blocks


@gluon.jit
def _consume(
    pointers: gl.tuple, rings: gl.tuple, sizes: gl.tuple, steps: gl.tuple, strides: gl.tuple,
    CONSUMER: gl.constexpr, STAGES: gl.constexpr, ODD: gl.constexpr,
) -> None:  # fmt: skip
    """A multiplying warpgroup: computes rows CONSUMER * 64 to CONSUMER * 64 + 63 of every tile."""
    y_ptr, x_scale_ptr, w_scale_ptr, owner_ptr = pointers
    x_ring, w_ring, full, empty = rings
    num_columns, num_blocks, num_tiles = sizes
    row_step, block_step = steps
    x_stride, w_scale_row, w_scale_block = strides
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    tiles_n = num_columns // BLOCK
    done = 0
    expert, row, end = _owner(owner_ptr, gl.program_id(0), num_tiles, tiles_n)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_expert, next_row, next_end = _owner(owner_ptr, tile + gl.num_programs(0), num_tiles, tiles_n)
        if row < end:
            column = tile % tiles_n * BLOCK
            row_M = row + CONSUMER * ROWS + gl.arange(0, ROWS, row_layout)
            inside_M = row_M < end
            x_ptr, w_row = x_scale_ptr + row_M, (expert * row_step + column) // BLOCK
            w_ptr = w_scale_ptr + w_row.to(gl.int64) * w_scale_row + (expert * block_step).to(gl.int64) * w_scale_block
            two = num_blocks > 1
            w_scale_0, w_scale_1 = gl.load(w_ptr), gl.load(w_ptr + w_scale_block, mask=two, other=0.0)
            x_scale_0 = gl.load(x_ptr, mask=inside_M, other=0.0)
            x_scale_1 = gl.load(x_ptr + x_stride, mask=inside_M & two, other=0.0)
            acc = gl.zeros([ROWS, BLOCK], gl.float32, layout)
            for block in range(0, num_blocks - 1, 2):
                at_0, at_1 = done + block, done + block + 1
                stage_0, stage_1 = at_0 % STAGES, at_1 % STAGES
                mbarrier.wait(full.index(stage_0), at_0 // STAGES & 1)
                w_KN = w_ring.index(stage_0).permute((1, 0))
                x_MK = x_ring.index(stage_0 * CONSUMERS + CONSUMER)
                sum_0 = warpgroup_mma(x_MK, w_KN, zero, use_acc=False, is_async=True)
                mbarrier.wait(full.index(stage_1), at_1 // STAGES & 1)
                w_KN = w_ring.index(stage_1).permute((1, 0))
                x_MK = x_ring.index(stage_1 * CONSUMERS + CONSUMER)
                sum_1 = warpgroup_mma(x_MK, w_KN, zero, use_acc=False, is_async=True)
                scale_0, scale_1 = x_scale_0 * w_scale_0, x_scale_1 * w_scale_1
                has_0, has_1 = block + 2 < num_blocks, block + 3 < num_blocks
                w_scale_0 = gl.load(w_ptr + (block + 2) * w_scale_block, mask=has_0, other=0.0)
                w_scale_1 = gl.load(w_ptr + (block + 3) * w_scale_block, mask=has_1, other=0.0)
                x_scale_0 = gl.load(x_ptr + (block + 2) * x_stride, mask=inside_M & has_0, other=0.0)
                x_scale_1 = gl.load(x_ptr + (block + 3) * x_stride, mask=inside_M & has_1, other=0.0)
                sum_0 = warpgroup_mma_wait(1, deps=[sum_0])
                mbarrier.arrive(empty.index(stage_0), count=1)
                acc = gl.fma(sum_0, gl.expand_dims(scale_0, 1), acc)
                sum_1 = warpgroup_mma_wait(0, deps=[sum_1])
                mbarrier.arrive(empty.index(stage_1), count=1)
                acc = gl.fma(sum_1, gl.expand_dims(scale_1, 1), acc)
            done += num_blocks
            if ODD:
                stage = (done - 1) % STAGES
                mbarrier.wait(full.index(stage), (done - 1) // STAGES & 1)
                w_KN = w_ring.index(stage).permute((1, 0))
                x_MK = x_ring.index(stage * CONSUMERS + CONSUMER)
                last = warpgroup_mma(x_MK, w_KN, zero, use_acc=False, is_async=True)
                last = warpgroup_mma_wait(0, deps=[last])
                mbarrier.arrive(empty.index(stage), count=1)
                acc = gl.fma(last, gl.expand_dims(x_scale_0 * w_scale_0, 1), acc)
            out = gl.convert_layout(acc.to(gl.bfloat16), STORE_LAYOUT)
            stored_M = row + CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORE_LAYOUT))
            column_N = gl.expand_dims(column + gl.arange(0, BLOCK, gl.SliceLayout(0, STORE_LAYOUT)), 0)
            y_ptrs = y_ptr + gl.expand_dims(stored_M, 1).to(gl.int64) * num_columns + column_N
            gl.store(y_ptrs, out, mask=gl.expand_dims(stored_M < end, 1))
        expert, row, end = next_expert, next_row, next_end


@gluon.jit(
    do_not_specialize=["num_blocks", "num_tiles", "row_step", "block_step", "x_stride", "w_scale_row", "w_scale_block"]
)
def _grouped_fp8_gemm_gluon_kernel(
    x_desc: gl.tensor, w_desc: gl.tensor, y_ptr: gl.tensor, x_scale_ptr: gl.tensor, w_scale_ptr: gl.tensor,
    owner_ptr: gl.tensor, num_columns: gl.tensor, num_blocks: gl.tensor, num_tiles: gl.tensor,
    row_step: gl.tensor, block_step: gl.tensor, x_stride: gl.tensor, w_scale_row: gl.tensor, w_scale_block: gl.tensor,
    STAGES: gl.constexpr, ODD: gl.constexpr,
) -> None:  # fmt: skip
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * CONSUMERS, ROWS, BLOCK], x_desc.layout)
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK, BLOCK], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    rings, steps = (x_ring, w_ring, full, empty), (row_step, block_step)
    sizes, strides = (num_columns, num_blocks, num_tiles), (x_stride, w_scale_row, w_scale_block)
    pointers = (y_ptr, x_scale_ptr, w_scale_ptr, owner_ptr)
    gl.warp_specialize(
        [
            (_consume, (pointers, rings, sizes, steps, strides, gl.constexpr(0), STAGES, ODD)),
            (_consume, (pointers, rings, sizes, steps, strides, gl.constexpr(1), STAGES, ODD)),
            (_produce, (x_desc, w_desc, owner_ptr, rings, sizes, steps, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def grouped_fp8_gemm_gluon(
    x: Quantized, w: Quantized, owner_O3: Tensor, steps: tuple[int, int], y_PN: Tensor, stages: int = STAGES
) -> None:
    """Writes y. Operands as for `grouped_fp8_gemm_triton`; `owner_O3` of tiles of 128 rows. steps: rows and blocks of
    `w.codes` from one expert's matrix to the next one's."""
    (rows, depth), columns = x.codes.shape, y_PN.shape[1]
    blocks, tiles = depth // 128, len(owner_O3) * (columns // 128)
    _grouped_fp8_gemm_gluon_kernel[(min(tiles, multiprocessors(x.codes.device)),)](
        TensorDescriptor(x.codes, [rows, depth], [depth, 1], [64, 128], CODES_LAYOUT),
        TensorDescriptor(w.codes, list(w.codes.shape), [w.codes.shape[1], 1], [128, 128], CODES_LAYOUT),
        y_PN, x.scale, w.scale, owner_O3, columns, blocks, tiles, *steps,
        x.scale.stride(1) if blocks > 1 else rows, w.scale.stride(0), w.scale.stride(1),
        STAGES=stages, ODD=blocks % 2, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
