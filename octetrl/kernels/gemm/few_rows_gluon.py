"""Linears of 1 to 64 rows in Gluon: y[M, N] = x[M, K] w[N, K]^T, FP8 with block scales or BF16.

fp8_gemm.py and bf16_gemm.py have the formulas. K is added in the same order as there, in one accumulator, so the bits
are the same. The time of such a GEMM is that of reading w, and a short one is bound by latency: the kernel keeps many
bytes in flight on every multiprocessor, and does little between two blocks of K.

A panel is 128 bytes of K: 128 codes, which is one block of scales, or 64 numbers in BF16. A stage has U panels of w and
of x, each loaded by one TMA request. A program computes `w_rows` columns of y for all rows. It has one warpgroup and
no other warps. It requests the first S stages, and for each stage in turn

    waits for it, multiplies its panels, waits for the products, adds them in order, requests the stage S further on.

The products of a stage overlap, and none is in flight when the loop repeats. A stage is requested again only after a
barrier of the whole program behind its last product. Therefore nothing has to signal that a stage is empty, and only
the accumulator is carried over the loop: slot and phase are functions of the stage's number. The only wait is for TMA,
which fills what lies outside of the tensor with zeros and always completes.

The MMA's long side has 64 rows, of w if `swap`, else of x. The panel of that operand may have fewer. The MMA then reads
on in the ring, other panels or the spare rows behind it, and those rows of the product are not stored.

Scales of FP8 are multiplied once, before the loop, and lie in shared memory by block of K. A stage that reaches beyond
K adds panels of zeros with the scale -1, and x + 0 * -1 is x even for x = -0.

`programmatic`: the program may start before the kernel in front has ended. It requests w at once and touches nothing
else before that kernel's writes are visible. The kernel in front must not write w.

M rows, N columns, K depth of the GEMM; S stages, U panels of a stage. Written for Gluon of Triton 3.6.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gluon_compat import thread_barrier

LONG_SIDE = gl.constexpr(64)  # rows of the MMA
PANEL_BYTES = gl.constexpr(128)
SCALE_BLOCK = gl.constexpr(128)  # elements of K, and rows of w, that share a scale
CHUNK = gl.constexpr(32)  # blocks of K whose scales are loaded together
SHARED_LIMIT = 227 * 1024  # bytes of shared memory of one program


class FewRows(NamedTuple):
    """One way to run the kernel."""

    w_rows: int  # columns of y of a program: 16, 32, 64 or 128
    tokens: int  # rows of x in a panel: 8, 16, 32 or 64, at least M
    stages: int
    panels: int  # U: 1, 2, 4 or 8
    swap: bool = False  # w on the MMA's long side
    programmatic: bool = False

    def shared_bytes(self, depth: int, fp8: bool) -> int:
        """Shared memory of a program, in bytes."""
        long, short = (self.w_rows, self.tokens) if self.swap else (self.tokens, self.w_rows)
        ring = (self.stages * self.panels * (long + short) + 64 - long) * 128
        scales = triton.cdiv(depth, 4096) * 32 * (self.tokens if self.swap else 64) * 4 if fp8 else 0
        return int(ring + scales + 8 * self.stages + 1024)


@gluon.jit
def _scales_into(
    scale_smem: gl.shared_memory_descriptor, x_scale_ptr: gl.tensor, w_scale_ptr: gl.tensor,
    num_rows: gl.tensor, num_blocks: gl.tensor, scale_stride: gl.tensor,
    SCALES: gl.constexpr, CHUNKS: gl.constexpr,
) -> None:  # fmt: skip
    """scale_smem[block, token] = x's scale times w's. Both arguments point to the tile's first scale."""
    lanes: gl.constexpr = SCALES if SCALES < 32 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [4, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    chunks = scale_smem._reinterpret(gl.float32, [CHUNKS, CHUNK, SCALES], flat)
    token = gl.expand_dims(gl.arange(0, SCALES, gl.SliceLayout(0, layout)), 0)
    for chunk in gl.static_range(CHUNKS):
        block = gl.expand_dims(chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout)), 1)
        inside = block < num_blocks
        w_scale = gl.load(w_scale_ptr + block, mask=inside, other=1.0)
        x_scale = gl.load(x_scale_ptr + block * scale_stride + token, mask=inside & (token < num_rows), other=-1.0)
        chunks.index(chunk).store(x_scale * w_scale)


@gluon.jit
def _request(
    desc: gl.tensor, row: gl.tensor, ring: gl.shared_memory_descriptor, full: gl.shared_memory_descriptor,
    stage: gl.tensor, num_stages: gl.tensor, STAGES: gl.constexpr, PANELS: gl.constexpr,
) -> None:  # fmt: skip
    """Loads the panels of `stage` into its slot. No request is made behind the last stage."""
    slot = stage % STAGES
    panels = ring.index(slot * PANELS)._reinterpret(desc.dtype, desc.block_shape, desc.layout)
    tma.async_copy_global_to_shared(desc, [stage * PANELS, row, 0], full.index(slot), panels, pred=stage < num_stages)


@gluon.jit(do_not_specialize=["num_rows", "num_blocks", "scale_stride"])
def _few_rows_gluon_kernel(
    x_desc: gl.tensor, w_desc: gl.tensor, x_scale_ptr: gl.tensor, w_scale_ptr: gl.tensor, y_ptr: gl.tensor,
    num_rows: gl.tensor, num_columns: gl.tensor, num_blocks: gl.tensor, scale_stride: gl.tensor,
    W_ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, PANELS: gl.constexpr, CHUNKS: gl.constexpr,
    SWAP: gl.constexpr, FP8: gl.constexpr, PROGRAMMATIC: gl.constexpr,
) -> None:  # fmt: skip
    LONG: gl.constexpr = W_ROWS if SWAP else TOKENS
    SHORT: gl.constexpr = TOKENS if SWAP else W_ROWS
    SCALES: gl.constexpr = TOKENS if SWAP else LONG_SIDE
    BYTES: gl.constexpr = (W_ROWS + TOKENS) * PANELS * PANEL_BYTES
    ELEMENT: gl.constexpr = 1 if FP8 else 2
    WIDTH: gl.constexpr = PANEL_BYTES // ELEMENT
    SPARE: gl.constexpr = LONG_SIDE // LONG - 1  # panels that the MMA may read behind the last one
    W_PANELS: gl.constexpr = STAGES * PANELS + (SPARE if SWAP else 0)
    X_PANELS: gl.constexpr = STAGES * PANELS + (0 if SWAP else SPARE)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * ELEMENT, rank=2)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, SHORT, 32 // ELEMENT])
    token_layout: gl.constexpr = gl.SliceLayout(0 if SWAP else 1, mma)
    column, num_stages = gl.program_id(0) * W_ROWS, gl.cdiv(num_blocks, PANELS)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [W_PANELS, W_ROWS, WIDTH], flat)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [X_PANELS, TOKENS, WIDTH], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for ahead in gl.static_range(STAGES):
        mbarrier.init(full.index(ahead), count=1)
    fence_async_shared()
    thread_barrier()
    for ahead in gl.static_range(STAGES):
        mbarrier.expect(full.index(ahead), BYTES, pred=ahead < num_stages)
        _request(w_desc, column, w_ring, full, ahead, num_stages, STAGES, PANELS)
    if PROGRAMMATIC:
        gdc_launch_dependents()
        gdc_wait()
    for ahead in gl.static_range(STAGES):
        _request(x_desc, 0, x_ring, full, ahead, num_stages, STAGES, PANELS)
    if FP8:
        scale_smem = gl.allocate_shared_memory(
            gl.float32, [CHUNKS * CHUNK, SCALES], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        w_scale_ptr += column // SCALE_BLOCK * num_blocks
        _scales_into(scale_smem, x_scale_ptr, w_scale_ptr, num_rows, num_blocks, scale_stride, SCALES, CHUNKS)
        thread_barrier()
    long_ring, short_ring = (w_ring, x_ring) if SWAP else (x_ring, w_ring)
    acc = gl.zeros([LONG_SIDE, SHORT], gl.float32, mma)
    zero = gl.zeros([LONG_SIDE, SHORT], gl.float32, mma)
    for stage in range(0, num_stages):
        slot = stage % STAGES
        mbarrier.wait(full.index(slot), stage // STAGES & 1)
        products = ()
        for i in gl.static_range(PANELS):
            a = long_ring.index(slot * PANELS + i)._reinterpret(w_desc.dtype, [LONG_SIDE, WIDTH], flat)
            b = short_ring.index(slot * PANELS + i).permute((1, 0))
            if FP8:
                products = products + (  # type: ignore[assignment]  # noqa: RUF005
                    warpgroup_mma(a, b, zero, use_acc=False, is_async=True),
                )
            else:
                acc = warpgroup_mma(a, b, acc, is_async=True)
        if FP8:
            for i in gl.static_range(PANELS):
                scale = scale_smem.index(stage * PANELS + i).load(token_layout)
                product = warpgroup_mma_wait(PANELS - 1 - i, deps=[products[i]])
                acc = gl.fma(product, gl.expand_dims(scale, 0 if SWAP else 1), acc)
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        thread_barrier()
        mbarrier.expect(full.index(slot), BYTES, pred=stage + STAGES < num_stages)
        _request(w_desc, column, w_ring, full, stage + STAGES, num_stages, STAGES, PANELS)
        _request(x_desc, 0, x_ring, full, stage + STAGES, num_stages, STAGES, PANELS)
    token = gl.expand_dims(gl.arange(0, SCALES, token_layout), 0 if SWAP else 1)
    place = gl.arange(0, LONG_SIDE if SWAP else SHORT, gl.SliceLayout(1 if SWAP else 0, mma))
    place = gl.expand_dims(place, 1 if SWAP else 0)
    inside = (token < num_rows) & (place < W_ROWS) & (column + place < num_columns)
    gl.store(y_ptr + token * num_columns + column + place, acc.to(y_ptr.dtype.element_ty), mask=inside)


def _launch(
    config: FewRows, x_MK: Tensor, w_NK: Tensor, scales: tuple[Tensor | None, Tensor | None], scale_stride: int
) -> Tensor:
    (m, k), n, size = x_MK.shape, w_NK.shape[0], w_NK.element_size()
    width, fp8 = 128 // size, scales[0] is not None
    y_MN = torch.empty(m, n, dtype=torch.bfloat16, device=x_MK.device)
    if k % width:
        raise ValueError(f"few_rows: K = {k}, must be a multiple of {width}")
    if m > config.tokens:
        raise ValueError(f"few_rows: {m} rows do not fit in {config}")
    if (config.w_rows if config.swap else config.tokens) > 64:
        raise ValueError(f"few_rows: {config} has more than 64 rows on the MMA's long side")
    if config.shared_bytes(k, fp8) > SHARED_LIMIT:
        raise ValueError(f"few_rows: {config} does not fit in shared memory")
    if m == 0:
        return y_MN
    blocks = k // width
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=3)
    strides = [width, k, 1]
    _few_rows_gluon_kernel[(triton.cdiv(n, config.w_rows),)](
        TensorDescriptor(x_MK, [blocks, m, width], strides, [config.panels, config.tokens, width], layout),
        TensorDescriptor(w_NK, [blocks, n, width], strides, [config.panels, config.w_rows, width], layout),
        scales[0], scales[1], y_MN, m, n, blocks, scale_stride,
        W_ROWS=config.w_rows, TOKENS=config.tokens, STAGES=config.stages, PANELS=config.panels,
        CHUNKS=triton.cdiv(blocks, 32) if fp8 else 1, SWAP=config.swap, FP8=fp8, PROGRAMMATIC=config.programmatic,
        num_warps=4, enable_fp_fusion=False, launch_pdl=config.programmatic,
    )  # fmt: skip
    return y_MN


def few_rows_fp8(x: Quantized, w: Quantized, scale_stride: int, config: FewRows) -> Tensor:
    """y[M, N] in BF16, with the bits of `fp8_gemm`. Operands and `scale_stride` are those of `check_operands`.

    Raises ValueError for a config that cannot take them.
    """
    if 128 % config.w_rows:
        raise ValueError(f"few_rows: {config} would need two scales of w in one tile")
    return _launch(config, x.codes, w.codes, (x.scale, w.scale), scale_stride)


def few_rows_bf16(x_MK: Tensor, w_NK: Tensor, config: FewRows) -> Tensor:
    """y[M, N] in BF16, with the bits of `bf16_gemm`. Both operands are BF16 and contiguous.

    Raises ValueError for a config that cannot take them.
    """
    assert x_MK.shape[1] == w_NK.shape[1], f"few_rows: {tuple(x_MK.shape)} by {tuple(w_NK.shape)}"
    assert x_MK.dtype == w_NK.dtype == torch.bfloat16, f"few_rows: {x_MK.dtype} by {w_NK.dtype}"
    assert x_MK.is_contiguous() and w_NK.is_contiguous(), "few_rows: operands must be contiguous"
    return _launch(config, x_MK, w_NK, (None, None), 0)
