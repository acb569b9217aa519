"""The BF16 GEMM of decoding: y[M, N] = x[M, K] w[N, K]^T with float32 sums and the bits of the trainer's `F.linear`.

cuBLAS adds along K in ascending order into one accumulator if y has enough tiles to fill the GPU. For few rows of a
narrow, deep weight (a `down` projection below M = 512) it splits K, and a row's bits change with the batch. Only in
that case this kernel runs. It is a plain loop over K, and its bits equal cuBLAS's at M >= 512 with any tiles.

`fp8_gemm_table.json` lists these weights under "bf16", as found by `lab/kernels/gemm.py`. A weight of a shape
that was not measured uses this kernel until y has two tiles per multiprocessor. Beyond that, cuBLAS has no reason to
split K. All other products use `F.linear`. Under "straight" are the fastest tiles of such weights, of mixtures and of
latent attention; a decode step has few tiles of them.

The caller adds a bias after the product is rounded. cuBLAS would add it before rounding, so the two would differ.

No gradient: use it under `no_grad`. M rows, N columns, K depth of the GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.kernels.gemm.fp8_gemm import Config, gemm_table, run_few_rows_bf16
from octetrl.kernels.gluon import COMPILER_ERRORS, gave_up, give_up, has_gluon

SMALLEST_UNSPLIT = 512  # rows; with this many or more, cuBLAS was never observed to split K
PLAIN = {  # keyed by the largest M that an entry covers, for an M beyond a weight's entries
    64: Config("straight", 64, 32, 4, tile_k=128),
    SMALLEST_UNSPLIT - 1: Config("straight", 128, 64, 4, tile_k=64),
}
LARGE = PLAIN[SMALLEST_UNSPLIT - 1]
ENOUGH_TILES = 264  # of 128 x 128 in y: two for each multiprocessor of an H100 or H200


@cache
def straight_config(m: int, n: int, k: int) -> Config | None:
    """The kernel's config for M rows by a weight [N, K], or None if `F.linear` has the right bits."""
    splitting, all_measured = gemm_table()["bf16"], gemm_table()["fp8"].keys() - gemm_table()["straight"].keys()
    if k % 8:
        return None
    if f"{n}x{k}" not in splitting and f"{n}x{k}" not in all_measured:
        return fastest_config(m, n, k) if triton.cdiv(m, 128) * triton.cdiv(n, 128) < ENOUGH_TILES else None
    found = splitting.get(f"{n}x{k}")
    if found is None or m >= SMALLEST_UNSPLIT:
        return None
    entries = _entries(found)
    if all(config.kernel == "few_rows" for config in entries.values()):  # faster, though cuBLAS splits nothing
        return next((config for largest, config in entries.items() if m <= largest), None)
    return next(config for largest, config in (entries | PLAIN).items() if m <= largest)


@cache
def fastest_config(m: int, n: int, k: int) -> Config:
    """The config for M rows by a weight [N, K] that does not use `F.linear`."""
    entries = _entries(gemm_table()["straight"].get(f"{n}x{k}", {}))
    return next((config for largest, config in entries.items() if m <= largest), plain_config(m))


def _entries(found: Mapping[str, Mapping[str, Any]]) -> dict[int, Config]:
    """A weight's configs in the table, by ascending M."""
    return {largest: Config(**found[str(largest)]) for largest in sorted(map(int, found))}


def plain_config(m: int) -> Config:
    """The config for M rows by a weight that is not in the table."""
    return next((config for largest, config in PLAIN.items() if m <= largest), LARGE)


def bf16_gemm(x_MK: Tensor, w_NK: Tensor, *, early: bool = False, is_part: bool = False) -> Tensor:
    """y[M, N] in BF16, with the bits that `F.linear` gives the same rows in a large batch. No gradient.

    Both operands are BF16 and, on a GPU, contiguous. `early`: that of `fp8_gemm`. `is_part`: w has some rows of a
    weight, so cuBLAS, whose order may depend on their number, does not multiply.
    """
    if not x_MK.is_cuda:
        return bf16_gemm_reference(x_MK, w_NK)
    config = straight_config(x_MK.shape[0], *w_NK.shape)
    if config is None:
        return bf16_gemm_straight(x_MK, w_NK) if is_part else F.linear(x_MK, w_NK)
    if config.kernel != "few_rows" or not has_gluon(x_MK.device):
        return bf16_gemm_triton(x_MK, w_NK, plain_config(x_MK.shape[0]) if config.kernel == "few_rows" else config)
    name = f"bf16_gemm, {config}"
    if not gave_up(name):
        try:
            return run_few_rows_bf16(config, x_MK, w_NK, early)
        except COMPILER_ERRORS as error:
            give_up(name, error)
    return bf16_gemm_triton(x_MK, w_NK, plain_config(x_MK.shape[0]))


def bf16_gemm_straight(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """The plain loop over K at any M, for weights so narrow that cuBLAS splits K at every M. No gradient.

    `out_dtype`: of the result, BF16 or float32; None: x's. On a GPU both operands are BF16 and contiguous. A K that is
    not a multiple of 8 is padded with zeros, which change no sum. Other dtypes use `F.linear` and promise no bits.
    """
    out_dtype = x_MK.dtype if out_dtype is None else out_dtype
    if not x_MK.is_cuda:
        return bf16_gemm_reference(x_MK, w_NK, out_dtype)
    if x_MK.dtype != torch.bfloat16:
        return F.linear(x_MK, w_NK).to(out_dtype)
    missing = -x_MK.shape[1] % 8
    if missing:
        x_MK, w_NK = F.pad(x_MK, (0, missing)), F.pad(w_NK, (0, missing))
    return bf16_gemm_triton(x_MK, w_NK, fastest_config(x_MK.shape[0], *w_NK.shape), out_dtype)


def bf16_gemm_reference(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """In plain torch: sums in float64, rounded to float32 and then to BF16, like a linear layer on a CPU."""
    return (x_MK.double() @ w_NK.double().t()).float().to(x_MK.dtype if out_dtype is None else out_dtype)


@triton.jit(do_not_specialize=["num_rows", "depth"])
def _bf16_gemm_kernel(
    x_desc,
    w_desc,
    y_ptr,
    num_rows,
    num_columns,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    start_m, start_n = tl.program_id(0) % tiles_m * BLOCK_M, tl.program_id(0) // tiles_m * BLOCK_N
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        x_MK = x_desc.load([start_m, start_k])
        w_NK = w_desc.load([start_n, start_k])
        acc_MN = tl.dot(x_MK, w_NK.T, acc_MN)
    row_M, column_N = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    inside_MN = (row_M < num_rows)[:, None] & (column_N < num_columns)[None, :]
    y_ptrs = y_ptr + row_M[:, None].to(tl.int64) * num_columns + column_N[None, :]
    tl.store(y_ptrs, acc_MN.to(y_ptr.dtype.element_ty), mask=inside_MN)


def bf16_gemm_triton(x_MK: Tensor, w_NK: Tensor, config: Config, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The plain loop over K, one tile per program. K must be a multiple of 8; M and N may be any number."""
    (m, k), n = x_MK.shape, w_NK.shape[0]
    assert w_NK.shape[1] == k and k % 8 == 0, f"bf16_gemm: {tuple(x_MK.shape)} by {tuple(w_NK.shape)}"
    assert x_MK.dtype == w_NK.dtype == torch.bfloat16, f"bf16_gemm: {x_MK.dtype} by {w_NK.dtype}"
    assert x_MK.is_contiguous() and w_NK.is_contiguous(), "bf16_gemm: operands must be contiguous"
    y_MN = torch.empty(m, n, dtype=out_dtype, device=x_MK.device)
    if m == 0:
        return y_MN
    options = {"enable_fp_fusion": False} if x_MK.is_cuda else {}
    _bf16_gemm_kernel[(triton.cdiv(m, config.tile_m) * triton.cdiv(n, config.tile_n),)](
        TensorDescriptor(x_MK, [m, k], [k, 1], [config.tile_m, config.tile_k]),
        TensorDescriptor(w_NK, [n, k], [k, 1], [config.tile_n, config.tile_k]),
        y_MN, m, n, k,
        BLOCK_M=config.tile_m, BLOCK_N=config.tile_n, BLOCK_K=config.tile_k, STAGES=config.stages,
        num_warps=config.warps, **options,
    )  # fmt: skip
    return y_MN
