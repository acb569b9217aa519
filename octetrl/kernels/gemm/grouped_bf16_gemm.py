"""The BF16 products of experts, in one launch each:

    forward   y[P, N]    = x[P, K] w_e[N, K]^T
    dgrad     dx[P, K]   = dy[P, N] w_e[N, K]              `turned`
    wgrad     dw_e[N, K] = dy_e[rows, N]^T x_e[rows, K]    an expert without rows has zeros

The forward is `bf16_gemm`'s straight loop over K, so a row's bits follow from the row and its expert's matrix. How rows
and experts are laid out, and why no launch reads the host, stands in grouped_fp8_gemm.py.

A bias of each expert is added to the float32 sum, which is then rounded once.

`part` multiplies by some rows of each expert's matrix, at their place in w: nothing is copied. Latent attention uses it
for the two parts of each head in `kv_b`.

P rows, X experts, N columns of a weight's product, K depth.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_reference
from octetrl.kernels.gemm.grouped_fp8_gemm import FEW, MANY, SOME, Tile, choose_tile, find_tile

DEPTH = 64  # of a tile
BF16_MANY = Tile(128, 256, 4)  # instead of MANY, for wide matrices
NARROW = Tile(64, 32, 5)  # for few rows of few columns, which would have too few programs
STAGES = {FEW: 5, SOME: 4, MANY: 3, BF16_MANY: 4, NARROW: 5}


class WgradTile(NamedTuple):
    columns: int  # of dy
    depth: int  # columns of x
    rows: int  # of both at a time
    stages: int
    warps: int


WIDE_WGRAD, NARROW_WGRAD = WgradTile(128, 256, 32, 6, 8), WgradTile(64, 128, 64, 4, 4)  # no bit depends on it


class Part(NamedTuple):
    """Rows of each expert's matrix that are used; `stop` None: to its end."""

    start: int = 0
    stop: int | None = None

    def of(self, rows: int) -> range:
        return range(rows)[self.start : self.stop]


WHOLE = Part()


@triton.jit
def straight_tile(
    x_desc, w_desc, x_row, x_column, w_row, start_n, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TURNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile [M, N] of one matrix's product in float32: its whole depth in one order, from row `x_row` and column
    `x_column` of x, and row `w_row` of w, which is [K, N] if `TURNED`. `SWAP`: the columns are the long operand."""
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start_k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        x_MK = x_desc.load([x_row, x_column + start_k])
        if TURNED:
            w_KN = w_desc.load([w_row + start_k, start_n])
        else:
            w_NK = w_desc.load([w_row + start_n, start_k])
            w_KN = w_NK.T
        acc = tl.dot(w_KN.T, x_MK.T, acc) if SWAP else tl.dot(x_MK, w_KN, acc)
    if SWAP:
        acc = acc.T
    return acc


@triton.jit(do_not_specialize=["depth", "row_step", "row_start"])
def _grouped_bf16_gemm_kernel(
    x_desc, w_desc, first_ptr, y_ptr, num_columns, depth, row_step, row_start,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TURNED: tl.constexpr, STAGES: tl.constexpr, bias_ptr,
):  # fmt: skip
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    start_n = tl.program_id(0) % tiles_n * BLOCK_N
    expert, start_m, end_m = find_tile(first_ptr, tile, EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if expert < EXPERTS:  # a tile may reach into the next expert's rows: x is 0 there, and they are finite
        w_row = expert * row_step + row_start
        acc = straight_tile(
            x_desc, w_desc, start_m, 0, w_row, start_n, depth, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TURNED, STAGES
        )
        row_M, column_N = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            bias_N = tl.load(bias_ptr + expert * num_columns + column_N, mask=column_N < num_columns, other=0.0)
            acc += bias_N.to(tl.float32)[None, :]
        inside_MN = (row_M < end_m)[:, None] & (column_N < num_columns)[None, :]
        y_ptrs = y_ptr + row_M[:, None].to(tl.int64) * num_columns + column_N[None, :]
        tl.store(y_ptrs, acc.to(tl.bfloat16), mask=inside_MN)


@triton.jit
def _grouped_wgrad_gradient_kernel(
    dy_desc, x_desc, dy_ptr, x_ptr, first_ptr, dw_ptr, num_columns, depth,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole blocks of rows by TMA, in a pipeline; the last one by masked loads, because the rows after it are another
    expert's. Without TMA all blocks by masked loads."""
    expert = tl.program_id(1)
    tiles_k = tl.cdiv(depth, BLOCK_K)
    start_n, start_k = tl.program_id(0) // tiles_k * BLOCK_N, tl.program_id(0) % tiles_k * BLOCK_K
    column_N, column_K = start_n + tl.arange(0, BLOCK_N), start_k + tl.arange(0, BLOCK_K)
    first, last = tl.load(first_ptr + expert), tl.load(first_ptr + expert + 1)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    rest = first
    if TMA:
        rest += (last - first) // BLOCK_P * BLOCK_P
        for start in tl.range(first, rest, BLOCK_P, num_stages=STAGES):
            dy_PN = dy_desc.load([start, start_n])
            x_PK = x_desc.load([start, start_k])
            acc = tl.dot(dy_PN.T, x_PK, acc)
    for start in tl.range(rest, last, BLOCK_P, num_stages=1):
        row_P = (start + tl.arange(0, BLOCK_P)).to(tl.int64)
        inside_PN = (row_P < last)[:, None] & (column_N < num_columns)[None, :]
        inside_PK = (row_P < last)[:, None] & (column_K < depth)[None, :]
        dy_PN = tl.load(dy_ptr + row_P[:, None] * num_columns + column_N[None, :], mask=inside_PN, other=0.0)
        x_PK = tl.load(x_ptr + row_P[:, None] * depth + column_K[None, :], mask=inside_PK, other=0.0)
        acc = tl.dot(dy_PN.T, x_PK, acc)
    dw_ptr += expert.to(tl.int64) * num_columns * depth
    inside_NK = (column_N < num_columns)[:, None] & (column_K < depth)[None, :]
    tl.store(dw_ptr + column_N[:, None] * depth + column_K[None, :], acc.to(dw_ptr.dtype.element_ty), mask=inside_NK)


def grouped_bf16_gemm_triton(
    x_PK: Tensor,
    w: Tensor,
    first_X1: Tensor,
    tile: Tile | None = None,
    *,
    turned: bool = False,
    part: Part = WHOLE,
    bias: Tensor | None = None,
) -> Tensor:
    """The launcher. N and K multiples of 8."""
    (rows, depth), experts = x_PK.shape, first_X1.numel() - 1
    step = w.shape[0] // experts
    used = part.of(step)
    columns = w.shape[1] if turned else len(used)
    assert w.shape[0] == experts * step and depth == (len(used) if turned else w.shape[1]), f"{tuple(w.shape)}"
    assert depth % 8 == 0 and columns % 8 == 0, f"grouped_bf16_gemm: {columns} x {depth} must be multiples of 8"
    assert x_PK.is_contiguous() and w.is_contiguous(), "grouped_bf16_gemm: operands must be contiguous"
    if tile is None:
        tile = choose_tile(rows, experts)
        tile = BF16_MANY if tile == MANY and columns >= BF16_MANY.columns else tile
    y_PN = torch.empty(rows, columns, dtype=torch.bfloat16, device=x_PK.device)
    if rows == 0:
        return y_PN
    w_tile = [DEPTH, tile.columns] if turned else [tile.columns, DEPTH]
    tiles = triton.cdiv(rows, tile.rows) + min(experts, rows)
    options = {"enable_fp_fusion": False} if x_PK.is_cuda else {}
    _grouped_bf16_gemm_kernel[(tiles * triton.cdiv(columns, tile.columns),)](
        TensorDescriptor(x_PK, [rows, depth], [depth, 1], [tile.rows, DEPTH]),
        TensorDescriptor(w, list(w.shape), [w.shape[1], 1], w_tile),
        first_X1, y_PN, columns, depth, step, used.start,
        EXPERTS=experts, EXPERTS_BLOCK=triton.next_power_of_2(experts), BLOCK_M=tile.rows, BLOCK_N=tile.columns,
        BLOCK_K=DEPTH, SWAP=tile.swap, TURNED=turned, STAGES=STAGES[tile], bias_ptr=bias,
        num_warps=8 if tile.rows >= 128 else 4, **options,
    )  # fmt: skip
    return y_PN


def grouped_wgrad_triton(
    dy_PN: Tensor, x_PK: Tensor, first_X1: Tensor, dtype: torch.dtype, tile: WgradTile | None = None
) -> Tensor:
    """dw [X N, K]. Both operands contiguous. TMA needs N and K in multiples of 8; others are slow."""
    (rows, columns), depth, experts = dy_PN.shape, x_PK.shape[1], first_X1.numel() - 1
    assert dy_PN.is_contiguous() and x_PK.is_contiguous(), "grouped_wgrad: operands must be contiguous"
    dw_NK = torch.empty(experts * columns, depth, dtype=dtype, device=x_PK.device)
    tile = (NARROW_WGRAD if min(columns, depth) < NARROW_WGRAD.depth else WIDE_WGRAD) if tile is None else tile
    tma = rows > 0 and not (columns % 8 or depth % 8) and dy_PN.dtype == x_PK.dtype == torch.bfloat16
    dy_desc = x_desc = None
    if tma:
        dy_desc = TensorDescriptor(dy_PN, [rows, columns], [columns, 1], [tile.rows, tile.columns])
        x_desc = TensorDescriptor(x_PK, [rows, depth], [depth, 1], [tile.rows, tile.depth])
    tiles = triton.cdiv(columns, tile.columns) * triton.cdiv(depth, tile.depth)
    _grouped_wgrad_gradient_kernel[(tiles, experts)](
        dy_desc, x_desc, dy_PN, x_PK, first_X1, dw_NK, columns, depth,
        BLOCK_P=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, TMA=tma, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return dw_NK


def grouped_bf16_gemm_reference(
    x_PK: Tensor,
    w: Tensor,
    first_X1: Tensor,
    *,
    turned: bool = False,
    part: Part = WHOLE,
    bias: Tensor | None = None,
) -> Tensor:
    """Expert by expert, sums in float64, rounded to float32 and then to the dtype."""
    bounds = first_X1.tolist()
    experts = [of_expert[part.start : part.stop] for of_expert in w.chunk(len(bounds) - 1)]
    columns = experts[0].shape[1] if turned else experts[0].shape[0]
    y_PN = torch.empty(x_PK.shape[0], columns, dtype=x_PK.dtype, device=x_PK.device)
    for expert, of_expert in enumerate(experts):
        rows = slice(bounds[expert], bounds[expert + 1])
        y_Pn = bf16_gemm_reference(x_PK[rows], of_expert.t() if turned else of_expert, torch.float32)
        y_PN[rows] = y_Pn if bias is None else y_Pn.add_(bias[expert * columns : (expert + 1) * columns])
    return y_PN


def grouped_wgrad_reference(dy_PN: Tensor, x_PK: Tensor, first_X1: Tensor, dtype: torch.dtype) -> Tensor:
    """Expert by expert, in float32."""
    bounds = first_X1.tolist()
    parts = [dy_PN[start:stop].float().t() @ x_PK[start:stop].float() for start, stop in pairwise(bounds)]
    return torch.cat(parts).to(dtype)


def grouped_bf16_gemm(
    x_PK: Tensor,
    w: Tensor,
    first_X1: Tensor,
    *,
    turned: bool = False,
    part: Part = WHOLE,
    bias: Tensor | None = None,
) -> Tensor:
    """y [P, N] in x's dtype. w [X N, K], or `turned` [X K, N]; first_X1: int32, rows of expert e are first[e] to
    first[e + 1]. `part`: w has more rows of each expert. `bias`: [X N]. A GPU takes BF16."""
    multiply = grouped_bf16_gemm_triton if x_PK.is_cuda else grouped_bf16_gemm_reference
    return multiply(x_PK, w, first_X1, turned=turned, part=part, bias=bias)


def grouped_wgrad(dy_PN: Tensor, x_PK: Tensor, first_X1: Tensor, dtype: torch.dtype) -> Tensor:
    """dw [X N, K] in `dtype`."""
    multiply = grouped_wgrad_triton if x_PK.is_cuda else grouped_wgrad_reference
    return multiply(dy_PN, x_PK, first_X1, dtype)


def grouped_bias_gradient(dy_PN: Tensor, first_X1: Tensor, dtype: torch.dtype) -> Tensor:
    """db [X N]: the sum of each expert's rows, as a product with ones (of 8 columns, which TMA can read)."""
    return grouped_wgrad(dy_PN, dy_PN.new_ones(len(dy_PN), 8), first_X1, dtype)[:, 0].contiguous()
