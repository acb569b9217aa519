"""The FP8 products of experts: every row of x by its expert's matrix, y[P, N] = x[P, K] w_e[N, K]^T, in one launch.

    acc = fma(sum over 128 of x * w, scale_x * scale_w, acc)        K ascending, one accumulator, no split

That is `fp8_gemm`'s order, so a row has the bits that `fp8_gemm` gives it with its expert's matrix, however many rows
the expert has. Rows are sorted by expert; `first_X1` says where each expert's begin, and lies on the device. The grid
follows from the number of rows and experts alone: ceil(P / tile) + X tiles are enough for any distribution, and those
that are not needed return at once. Nothing is read by the host, so the launch can be captured.

`sort_by_expert` says which tile has which rows, and a program reads three numbers in place of searching `first_X1` (one
layer of Qwen3-30B-A3B at 256 tokens on an H200: 165 microseconds instead of 196). Without the search a program of 64
rows also needs 160 registers instead of 192: three fit into a multiprocessor.

Experts of many rows have owners of 128 rows. On Hopper they are one tile of grouped_fp8_gemm_gluon.py, with the same
bits, and elsewhere two tiles of 64.

A last block of a matrix may be ragged, in rows or depth (gpt-oss: 2,880 = 22.5 x 128); every expert's blocks begin at
its first row. Past the depth TMA reads zeros of x, so what it reads of w there, of the next expert, adds nothing.

A bias of each expert is added to the float32 sum, which is then rounded once.

`turned` multiplies by the transposed codes, for dgrad: dx[P, K] = dy[P, N] w_e[N, K] with codes [K, X N].

P rows, X experts, N columns of y, K depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.fp8.backends import BackendName, fp8_gemm_dgrad, fp8_gemm_nt
from octetrl.fp8.format import BLOCK
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gluon import COMPILER_ERRORS, can_run, give_up
from octetrl.kernels.rows.sort_by_expert import MANY_ROWS, OWNED_ROWS, rows_of_tiles


class Tile(NamedTuple):
    """`swap` lays the weights on the MMA's long side and the rows on its short one."""

    rows: int
    columns: int
    stages: int
    swap: bool = False


FEW, SOME, MANY = Tile(16, 64, 6, swap=True), Tile(64, 64, 4), Tile(128, 128, 3)
ALIGNED = 16  # codes of 16 bytes: TMA reads rows that begin at multiples of them
FP8_MANY = Tile(64, 128, 4)  # for codes, instead of SOME and MANY (lab/log.md)

OWNED = {rows: Tile(min(rows, 64), 128, 3, swap=rows < 64) for rows in (*OWNED_ROWS, MANY_ROWS)}  # by owners' rows


def choose_tile(rows: int, experts: int) -> Tile:
    """By the mean number of rows of an expert, which shapes tell. No bit depends on it."""
    mean = rows / experts
    return FEW if mean <= 16 else SOME if mean <= 96 else MANY


@triton.jit
def find_tile(first_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile of ROWS rows, its first row, and the end of its expert's rows; an expert >= EXPERTS has no
    work."""
    expert_X = tl.arange(0, EXPERTS_BLOCK)
    is_expert_X = expert_X < EXPERTS
    first_X = tl.load(first_ptr + expert_X, mask=is_expert_X, other=0)
    last_X = tl.load(first_ptr + 1 + expert_X, mask=is_expert_X, other=0)
    tiles_X = (last_X - first_X + ROWS - 1) // ROWS
    end_X = tl.cumsum(tiles_X, 0)
    expert = tl.sum(tl.where(is_expert_X & (end_X <= tile), 1, 0), 0)
    is_it_X = expert_X == expert
    first = tl.sum(tl.where(is_it_X, first_X, 0), 0)
    last = tl.sum(tl.where(is_it_X, last_X, 0), 0)
    skipped = tl.sum(tl.where(is_it_X, end_X - tiles_X, 0), 0)
    return expert, first + (tile - skipped) * ROWS, last


@triton.jit(do_not_specialize=["num_blocks", "x_scale_stride"])
def _grouped_fp8_gemm_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, first_ptr, owner_ptr, y_ptr, num_columns, num_blocks, x_scale_stride,
    row_step, block_step, w_scale_row, w_scale_column,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr, bias_ptr,
    column_step, scale_step,
):  # fmt: skip
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    start_n = tl.program_id(0) % tiles_n * BLOCK_N
    if TILES > 0:  # of an owner
        owner_ptr += 3 * (tile // TILES)
        expert, start_m, end_m = tl.load(owner_ptr), tl.load(owner_ptr + 1), tl.load(owner_ptr + 2)
        start_m += tile % TILES * BLOCK_M
    else:
        expert, start_m, end_m = find_tile(first_ptr, tile, EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if start_m < end_m:
        row_M, column_N = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
        w_row, w_block = expert * row_step + start_n, expert * block_step
        if column_step is None:
            w_scale_ptr += (w_row // 128).to(tl.int64) * w_scale_row + w_block.to(tl.int64) * w_scale_column
        else:
            scale_block = expert * scale_step + start_n // 128
            w_scale_ptr += scale_block.to(tl.int64) * w_scale_row + w_block.to(tl.int64) * w_scale_column
        acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            scale_M = tl.load(x_scale_ptr + row_M + block * x_scale_stride, mask=row_M < end_m, other=0.0)
            scale_M = scale_M * tl.load(w_scale_ptr + block * w_scale_column)
            x_MK = x_desc.load([start_m, block * 128])
            if column_step is None:
                w_NK = w_desc.load([w_row, (w_block + block) * 128])
            else:
                w_NK = w_desc.load([w_row, expert * column_step + block * 128])
            if SWAP:
                acc = tl.fma(tl.dot(w_NK, x_MK.T), scale_M[None, :], acc)
            else:
                acc = tl.fma(tl.dot(x_MK, w_NK.T), scale_M[:, None], acc)
        if SWAP:
            acc = acc.T
        if bias_ptr is not None:
            bias_N = tl.load(bias_ptr + expert * num_columns + column_N, mask=column_N < num_columns, other=0.0)
            acc += bias_N.to(tl.float32)[None, :]
        inside_MN = (row_M < end_m)[:, None] & (column_N < num_columns)[None, :]
        y_ptrs = y_ptr + row_M[:, None].to(tl.int64) * num_columns + column_N[None, :]
        tl.store(y_ptrs, acc.to(tl.bfloat16), mask=inside_MN)


def grouped_fp8_gemm_triton(
    x: Quantized,
    w: Quantized,
    first_X1: Tensor,
    tile: Tile | None = None,
    *,
    turned: bool = False,
    owner_O3: Tensor | None = None,
    bias: Tensor | None = None,
    gluon: bool = True,
) -> Tensor:
    """The launcher. N and K multiples of 16. x.scale with strides (1, room). `owner_O3`: of tiles of `tile.rows` rows,
    without `tile` as `sort_by_expert` gives it. `gluon`: whether Gluon may run, which takes whole blocks only."""
    rows, depth = x.codes.shape
    experts = first_X1.numel() - 1
    columns = w.codes.shape[0] if turned else w.codes.shape[0] // experts
    assert depth % ALIGNED == 0 and columns % ALIGNED == 0, f"grouped_fp8_gemm: {columns} x {depth}"
    assert w.codes.shape[1] == (experts * depth if turned else depth), f"grouped_fp8_gemm: {tuple(w.codes.shape)}"
    assert x.codes.is_contiguous() and w.codes.is_contiguous(), "grouped_fp8_gemm: codes must be contiguous"
    assert rows <= 1 or x.scale.stride(0) == 1, f"grouped_fp8_gemm: x.scale has strides {x.scale.stride()}"
    y_PN = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.codes.device)
    if rows == 0:
        return y_PN
    blocks = triton.cdiv(depth, BLOCK)
    steps = (0, blocks) if turned else (columns, 0)  # rows and blocks of w from one expert to the next
    whole = depth % BLOCK == columns % BLOCK == 0
    column_step, scale_step = (
        (depth, 0) if turned else (0, triton.cdiv(columns, BLOCK))
    )  # of w, and of its scales' rows
    tiles_of_owner = 0 if owner_O3 is None else 1
    if tile is None and owner_O3 is not None:
        owned = rows_of_tiles(rows, experts)
        gluon &= bias is None and whole
        if gluon and owned == MANY_ROWS and _run_gluon(x, w, owner_O3, steps, y_PN):
            return y_PN
        tile, tiles_of_owner = OWNED[owned], owned // OWNED[owned].rows
    if tile is None:
        tile = FEW if choose_tile(rows, experts) == FEW else FP8_MANY
    tiles = triton.cdiv(rows, tile.rows) + min(experts, rows) if owner_O3 is None else len(owner_O3) * tiles_of_owner
    options = {"enable_fp_fusion": False} if x.codes.is_cuda else {}
    _grouped_fp8_gemm_kernel[(tiles * triton.cdiv(columns, tile.columns),)](
        TensorDescriptor(x.codes, [rows, depth], [depth, 1], [tile.rows, BLOCK]),
        TensorDescriptor(w.codes, list(w.codes.shape), [w.codes.shape[1], 1], [tile.columns, BLOCK]),
        x.scale, w.scale, first_X1, owner_O3, y_PN, columns, blocks, x.scale.stride(1) if blocks > 1 else rows,
        *steps, w.scale.stride(0), w.scale.stride(1),
        EXPERTS=experts, EXPERTS_BLOCK=triton.next_power_of_2(experts), BLOCK_M=tile.rows, BLOCK_N=tile.columns,
        SWAP=tile.swap, STAGES=tile.stages, TILES=tiles_of_owner, bias_ptr=bias,
        column_step=None if whole else column_step, scale_step=None if whole else scale_step,
        num_warps=8 if tile.rows >= 128 else 4,
        **options,
    )  # fmt: skip
    return y_PN


def _run_gluon(x: Quantized, w: Quantized, owner_O3: Tensor, steps: tuple[int, int], y_PN: Tensor) -> bool:
    """Whether it ran."""
    if not can_run("grouped_fp8_gemm_gluon", x.codes, w.codes):
        return False
    try:
        from octetrl.kernels.gemm.grouped_fp8_gemm_gluon import grouped_fp8_gemm_gluon

        grouped_fp8_gemm_gluon(x, w, owner_O3, steps, y_PN)
    except COMPILER_ERRORS as error:
        give_up("grouped_fp8_gemm_gluon", error)
        return False
    return True


def grouped_fp8_gemm_reference(
    x: Quantized,
    w: Quantized,
    first_X1: Tensor,
    *,
    turned: bool = False,
    bias: Tensor | None = None,
    backend: BackendName = "emulated",
) -> Tensor:
    """Expert by expert with the emulation, exact if not `turned`. `backend`: of the linears; a GPU's is emulated."""
    multiply = fp8_gemm_dgrad if turned else fp8_gemm_nt
    emulation: BackendName = "mxfp8" if backend == "mxfp8" else "emulated"
    bounds = first_X1.tolist()
    experts = len(bounds) - 1
    codes = w.codes.chunk(experts, dim=1 if turned else 0)
    scales = w.scale.chunk(experts, dim=1 if turned else 0)
    y_PN = torch.empty(x.codes.shape[0], codes[0].shape[0], dtype=torch.bfloat16, device=x.codes.device)
    for expert in range(experts):
        rows = slice(bounds[expert], bounds[expert + 1])
        if bounds[expert] < bounds[expert + 1]:
            of_rows = Quantized(x.codes[rows], x.scale[rows])
            out_dtype = torch.bfloat16 if bias is None else torch.float32
            y_Pn = multiply(of_rows, Quantized(codes[expert], scales[expert]), emulation, out_dtype)
            columns = slice(expert * y_Pn.shape[1], (expert + 1) * y_Pn.shape[1])
            y_PN[rows] = y_Pn if bias is None else y_Pn.add_(bias[columns])
    return y_PN


def grouped_fp8_gemm(
    x: Quantized,
    w: Quantized,
    first_X1: Tensor,
    *,
    turned: bool = False,
    owner_O3: Tensor | None = None,
    bias: Tensor | None = None,
    backend: BackendName = "emulated",
) -> Tensor:
    """y [P, N] in BF16. x: codes [P, K], scale [P, ceil(K/128)]; w: codes [X N, K] and scale [X ceil(N/128),
    ceil(K/128)], or `turned` [N, X K] and [ceil(N/128), X ceil(K/128)]; first_X1: int32, rows of expert e are
    first[e] to first[e + 1]. `owner_O3`: as `sort_by_expert` gives it; no bit depends on it. `bias`: [X N].
    `backend`: of a CPU."""
    if not x.codes.is_cuda:
        return grouped_fp8_gemm_reference(x, w, first_X1, turned=turned, bias=bias, backend=backend)
    return grouped_fp8_gemm_triton(x, w, first_X1, turned=turned, owner_O3=owner_O3, bias=bias)
