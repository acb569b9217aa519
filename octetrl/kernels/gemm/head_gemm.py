"""The BF16 products of heads, in one launch: every head of a token by the head's matrix, or by some rows of it.

    y[T, H, N] = x[T, H, K] w_h[N, K]^T,  or `turned`:  x[T, H, K] w_h[K, N]

It is `grouped_bf16_gemm` for groups of equal size: the same tiles and the same loop over K (`straight_tile`), hence the
same bits. But nothing is copied. x may be a view, such as a part of every query; y is contiguous, as the next op reads
it. Latent attention multiplies by `kv_b` with it, twice a layer. Each of these products was up to four launches: where
the groups begin, x by head, the product, and y by token.

`head_gemm_codes` stores the codes of y instead, for an FP8 product that reads it. A tile has one block of 128 columns,
so its program knows each row's largest value. The bytes equal those of `quantize_activation` of y.

TMA reads x as a matrix, in which a head begins at another column (if a token's heads are side by side) or at another
row (if a head's tokens are). `can_run` says which views can be read so.

T tokens, H heads, N columns of y, K depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_reference
from octetrl.kernels.gemm.grouped_bf16_gemm import DEPTH, NARROW, STAGES, WHOLE, Part, straight_tile
from octetrl.kernels.gemm.grouped_fp8_gemm import MANY, SOME, Tile, choose_tile
from octetrl.kernels.programmatic_launch import let_next_start, lets_next_start
from octetrl.kernels.quantize.quantize_activation import block_scale, e4m3_byte, empty_rows, magnitude_bits, scale_rows

CODES_TILES = (Tile(16, 128, 5, swap=True), Tile(32, 128, 5, swap=True), Tile(64, 128, 4), MANY)
ALIGNED = 8  # elements of BF16 in TMA's 16 bytes


@triton.jit(do_not_specialize=["num_tokens", "depth", "head_row", "head_column", "w_step", "w_start"])
def _head_gemm_kernel(
    x_desc, w_desc, y_ptr, scale_ptr, num_tokens, num_columns, depth, head_row, head_column, w_step, w_start,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    TURNED: tl.constexpr, STAGES: tl.constexpr, QUANTIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    start_n = tl.program_id(0) % tiles_n * BLOCK_N
    start_m = tl.program_id(0) // tiles_n % tiles_m * BLOCK_M
    head = tl.program_id(0) // tiles_n // tiles_m
    x_row, x_column, w_row = head * head_row + start_m, head * head_column, head * w_step + w_start
    acc = straight_tile(
        x_desc, w_desc, x_row, x_column, w_row, start_n, depth, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TURNED, STAGES
    )
    token_M, column_N = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    if QUANTIZE:  # a tile has one block of each row, at a multiple of 128 bytes
        y_MN = acc.to(tl.bfloat16).to(tl.float32)
        scale_M, inverse_M = block_scale(tl.max(magnitude_bits(y_MN), 1), POWER_OF_TWO)
        block = head * tiles_n + start_n // BLOCK_N
        start_M = (token_M.to(tl.int64) * (HEADS * tiles_n) + block) * BLOCK_N
        code_ptrs = y_ptr + start_M[:, None] + tl.arange(0, BLOCK_N)[None, :]
        tl.store(code_ptrs, e4m3_byte(y_MN * inverse_M[:, None]), mask=(token_M < num_tokens)[:, None])
        tl.store(scale_ptr + block.to(tl.int64) * scale_rows(num_tokens) + token_M, scale_M, mask=token_M < num_tokens)
    else:
        inside_MN = (token_M < num_tokens)[:, None] & (column_N < num_columns)[None, :]
        y_ptrs = y_ptr + (token_M[:, None].to(tl.int64) * HEADS + head) * num_columns + column_N[None, :]
        tl.store(y_ptrs, acc.to(tl.bfloat16), mask=inside_MN)


def can_run(x_THK: Tensor, w: Tensor) -> bool:
    """Whether TMA can read both operands, and no tile of a head reaches into another head's columns."""
    of_token, of_head, of_value = x_THK.stride()
    if of_value != 1 or (of_token | of_head | w.shape[1]) % ALIGNED or (x_THK.data_ptr() | w.data_ptr()) % 16:
        return False
    return _side_by_side(x_THK) or (of_token >= x_THK.shape[2] and of_head == x_THK.shape[0] * of_token)


def _side_by_side(x_THK: Tensor) -> bool:
    """Whether the heads of a token lie in one row, with a whole number of tiles in each head's depth."""
    tokens, heads, depth = x_THK.shape
    of_token, of_head, _ = x_THK.stride()
    return depth % DEPTH == 0 and of_head >= depth and (tokens == 1 or of_token >= heads * of_head)


def choose_head_tile(tokens: int, columns: int) -> Tile:
    """By measurements of latent attention's two products (lab/log.md). No bit depends on it."""
    if 16 < tokens <= 256 and columns <= 128:
        return NARROW
    return SOME if 16 < tokens <= 128 else choose_tile(tokens, 1)


def choose_codes_tile(tokens: int) -> Tile:
    """The tile of `head_gemm_codes`. Few rows, so that there are programs enough. No bit depends on it."""
    return next(tile for tile in CODES_TILES if tokens <= 8 * tile.rows or tile is CODES_TILES[-1])


def head_gemm_triton(
    x_THK: Tensor, w: Tensor, *, turned: bool = False, part: Part = WHOLE, tile: Tile | None = None
) -> Tensor:
    """The launcher. If `turned`, K is a multiple of 64 or all rows of a head's matrix."""
    columns = w.shape[1] if turned else len(part.of(w.shape[0] // x_THK.shape[1]))
    y_THN = torch.empty(*x_THK.shape[:2], columns, dtype=torch.bfloat16, device=x_THK.device)
    tile = choose_head_tile(len(x_THK), columns) if tile is None else tile
    _launch(x_THK, w, y_THN, None, tile, part, turned=turned, power_of_two=False)
    return y_THN


def head_gemm_codes_triton(
    x_THK: Tensor, w: Tensor, *, part: Part = WHOLE, power_of_two: bool = False, tile: Tile | None = None
) -> Quantized:
    """The launcher for codes. N a multiple of 128."""
    tokens, heads, _ = x_THK.shape
    columns = len(part.of(w.shape[0] // heads))
    assert columns % BLOCK == 0, f"head_gemm_codes: {columns} columns of a head are not in whole blocks"
    codes, scale = empty_rows(tokens, heads * columns, x_THK.device)
    tile = choose_codes_tile(tokens) if tile is None else tile
    assert tile.columns == BLOCK, f"head_gemm_codes: a tile has {BLOCK} columns, not {tile.columns}"
    _launch(x_THK, w, codes, scale, tile, part, turned=False, power_of_two=power_of_two)
    return Quantized(codes.view(E4M3), scale)


def _launch(
    x_THK: Tensor, w: Tensor, y: Tensor, scale: Tensor | None, tile: Tile, part: Part, *, turned: bool,
    power_of_two: bool,
) -> None:  # fmt: skip
    """Writes y [T, H, N] or, with scales, its codes."""
    tokens, heads, depth = x_THK.shape
    step, width = w.shape[0] // heads, w.shape[1]
    used = part.of(step)
    columns = width if turned else len(used)
    assert w.shape[0] == heads * step and depth == (len(used) if turned else width), f"head_gemm: {tuple(w.shape)}"
    assert w.is_contiguous() and can_run(x_THK, w), f"head_gemm: strides {x_THK.stride()}, {w.stride()}"
    if tokens == 0:
        return
    of_token, of_head, _ = x_THK.stride()
    if _side_by_side(x_THK):
        shape, head_row, head_column = [tokens, (heads - 1) * of_head + depth], 0, of_head
        stride = max(of_token, heads * of_head)  # of one token it may be any number
    else:
        shape, stride, head_row, head_column = [heads * tokens, depth], of_token, tokens, 0
    w_tile = [DEPTH, tile.columns] if turned else [tile.columns, DEPTH]
    options = {"enable_fp_fusion": False} if x_THK.is_cuda else {}
    _head_gemm_kernel[(heads * triton.cdiv(tokens, tile.rows) * triton.cdiv(columns, tile.columns),)](
        TensorDescriptor(x_THK, shape, [stride, 1], [tile.rows, DEPTH]),
        TensorDescriptor(w, list(w.shape), [width, 1], w_tile),
        y, scale, tokens, columns, depth, head_row, head_column, step, used.start,
        HEADS=heads, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=DEPTH, SWAP=tile.swap, TURNED=turned,
        STAGES=STAGES.get(tile, tile.stages), QUANTIZE=scale is not None, POWER_OF_TWO=power_of_two,
        EARLY=scale is not None and lets_next_start(x_THK), num_warps=8 if tile.rows >= 128 else 4, **options,
    )  # fmt: skip


def head_gemm_reference(x_THK: Tensor, w: Tensor, *, turned: bool = False, part: Part = WHOLE) -> Tensor:
    """Head by head, sums in float64, rounded to float32 and then to the dtype."""
    matrices = [of_head[part.start : part.stop] for of_head in w.chunk(x_THK.shape[1])]
    heads = [
        bf16_gemm_reference(x_TK, of_head.t() if turned else of_head)
        for x_TK, of_head in zip(x_THK.unbind(1), matrices, strict=True)
    ]
    return torch.stack(heads, dim=1)


def head_gemm(x_THK: Tensor, w: Tensor, *, turned: bool = False, part: Part = WHOLE) -> Tensor:
    """y [T, H, N] in x's dtype, contiguous. w [H N, K], or `turned` [H K, N]. `part`: w has more rows of each head. A
    GPU takes BF16 operands for which `can_run` is true. No gradient."""
    if x_THK.is_cuda:
        return head_gemm_triton(x_THK, w, turned=turned, part=part)
    return head_gemm_reference(x_THK, w, turned=turned, part=part)


def head_gemm_codes_reference(x_THK: Tensor, w: Tensor, *, part: Part = WHOLE, power_of_two: bool = False) -> Quantized:
    """In plain torch, from the references of its parts."""
    return quantize_activation_reference(head_gemm_reference(x_THK, w, part=part).flatten(1), power_of_two)


def head_gemm_codes(x_THK: Tensor, w: Tensor, *, part: Part = WHOLE, power_of_two: bool = False) -> Quantized:
    """`head_gemm`, not turned, as codes [T, H N] with their scales. A GPU takes an N that is a multiple of 128."""
    run = head_gemm_codes_triton if x_THK.is_cuda else head_gemm_codes_reference
    return run(x_THK, w, part=part, power_of_two=power_of_two)
