"""The forward's block-scaled FP8 GEMM at every number of rows: y[M, N] = x[M, K] w[N, K]^T, BF16.

    acc = fma(sum over 128 of x * w, scale_x * scale_w, acc)        K ascending, one accumulator, no split

cuBLAS adds in this order too (fp8/scaled_mm.py). A row of y therefore has the same bits from every kernel here and for
every M: decoding one token at a time and training on a whole pack agree. The choice of a kernel affects speed only. It
depends on (N, K, M) and comes from `fp8_gemm_table.json`, which `lab/kernels/gemm.py` measures and writes:

    triton       one tile per program. Codes come by TMA. Scales are loaded in the loop, so Triton stages them through
                 shared memory with the tiles
    gluon        fp8_gemm_gluon.py: persistent programs, one warp loads, one or two warpgroups multiply
    few_rows     few_rows_gluon.py, for at most 64 rows: `tile_m` is its tokens, `tile_n` its w_rows, `group` its panels
    scaled_mm    cuBLAS, from M = 32 on. Below it cuBLAS may add in another order

An entry covers every M from its own down to the next smaller entry. A shape that is not in the table uses plain Triton
up to M = 256 and cuBLAS beyond. If K or N is not a multiple of 128, cuBLAS runs on padded copies; Triton needs no copy,
because TMA reads zeros past the last column, and zeros change no sum. If K is not a multiple of 16, TMA can't address
the rows, and cuBLAS always runs.

That is Hopper. On another architecture (fp8/architectures.py) plain Triton runs at every M, in the backward too.

A tile has at most 128 columns of y and 128 is a multiple of that number, so a tile needs one weight scale per block of
K. `swap` puts the weights on the MMA's long side (64 rows) and the tokens on its short side; it is for few tokens. If
the long side has fewer than 64 rows, Triton uses mma.sync, which permutes K and changes the bits. The launcher refuses
such a tile.

M rows, N columns, K depth of the GEMM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octetrl.fp8.backends import BACKENDS, Backend, fp8_gemm_nt
from octetrl.fp8.format import BLOCK
from octetrl.fp8.quantize import Quantized, is_square
from octetrl.kernels.gluon import COMPILER_ERRORS, gave_up, give_up, has_gluon
from octetrl.system.errors import UserError

gluon_launcher: Callable[..., Tensor] | None
try:
    from octetrl.kernels.gemm.few_rows_gluon import FewRows, few_rows_bf16, few_rows_fp8
    from octetrl.kernels.gemm.fp8_gemm_gluon import fp8_gemm_gluon as gluon_launcher
except ImportError as error:  # Gluon is an experimental part of Triton, and its names change
    gluon_launcher, _no_gluon = None, error

TABLE = Path(__file__).with_name("fp8_gemm_table.json")
LARGEST_WITHOUT_ENTRY = 256  # rows; beyond this, a shape that is not in the table uses cuBLAS
SMALLEST_SCALED_MM = 32
TMA_BYTES = 16  # rows of codes start at multiples of it
IN_GLUON = ("gluon", "few_rows")
SCALES_OF_16_BYTES = 4  # Gluon loads x's scales by TMA, whose lines start at multiples of 16 bytes


class Config(NamedTuple):
    """One way to run a GEMM. `kernel`: triton, gluon, few_rows or scaled_mm; in BF16 straight or few_rows. scaled_mm
    uses no other field."""

    kernel: str
    tile_m: int = 0
    tile_n: int = 0
    stages: int = 0
    warps: int = 4  # gluon: 4 per consumer; tile_m sets the number of consumers
    tile_k: int = 128  # FP8: always one block of scales
    group: int = 1  # tiles along M that are computed before the next tile along N
    swap: bool = False  # triton and few_rows

    def as_json(self) -> dict[str, object]:
        """The fields that differ from the default, `kernel` first."""
        return {name: value for name, value in self._asdict().items() if value != self._field_defaults.get(name)}


SCALED_MM = Config("scaled_mm")
PLAIN = {  # keyed by the largest M that an entry covers; these compile and fit for every shape
    16: Config("triton", 16, 64, 6, swap=True),
    64: Config("triton", 64, 64, 4),
    LARGEST_WITHOUT_ENTRY: Config("triton", 128, 64, 3),
}


# ---------------------------------------------------------------- which kernel


@cache
def gemm_table() -> Mapping[str, Any]:
    """The checked-in table: {"fp8": {"NxK": {"M": config}}, "bf16": the same for bf16_gemm.py}, as parsed JSON."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@cache
def fp8_entries(n: int, k: int) -> dict[int, Config]:
    """The table's configs for one weight, by ascending M."""
    found = gemm_table()["fp8"].get(f"{n}x{k}", {})
    return {m: Config(**found[str(m)]) for m in sorted(map(int, found))}


@cache
def choose_config(m: int, n: int, k: int) -> Config:
    """The config for M rows by a weight [N, K]. K is a multiple of 16."""
    entries = fp8_entries(n, k)
    entry = next((config for largest, config in entries.items() if m <= largest), None)
    if entry is not None and not (entry.kernel == "scaled_mm" and m < SMALLEST_SCALED_MM):
        return entry
    return plain_config(m)


def plain_config(m: int) -> Config:
    """The config for a shape that is not in the table."""
    return next((config for largest, config in PLAIN.items() if m <= largest), SCALED_MM)


def run_config(config: Config, x: Quantized, w: Quantized, early: bool = False) -> Tensor:
    """The GEMM with exactly this config. Raises what its compiler raises. `early`: that of `fp8_gemm`."""
    if config.kernel == "scaled_mm":
        return fp8_gemm_nt(x, w, "scaled_mm")
    if config.kernel == "triton":
        return fp8_gemm_triton(x, w, config)
    if gluon_launcher is None:
        raise _no_gluon
    if config.kernel == "few_rows":
        return few_rows_fp8(x, w, check_operands(x, w), few_rows_variant(config, early))
    return gluon_launcher(x, w, check_operands(x, w), config.tile_m, config.tile_n, config.stages, config.group)


def run_few_rows_bf16(config: Config, x_MK: Tensor, w_NK: Tensor, early: bool = False) -> Tensor:
    """The BF16 product of bf16_gemm.py with exactly this config. Raises what its compiler raises."""
    if gluon_launcher is None:
        raise _no_gluon
    return few_rows_bf16(x_MK, w_NK, few_rows_variant(config, early))


def few_rows_variant(config: Config, early: bool = False) -> FewRows:
    """The kernel's own form of such a config."""
    return FewRows(config.tile_n, config.tile_m, config.stages, config.group, config.swap, early)


def fp8_gemm(x: Quantized, w: Quantized, *, early: bool = False) -> Tensor:
    """y[M, N] = x[M, K] w[N, K]^T in BF16. x: scale [M, ceil(K/128)] with strides (1, M); w: scale [ceil(N/128),
    ceil(K/128)], contiguous.

    The bits equal `fp8_gemm_nt(x, w, "scaled_mm")`, in less time at the sizes of decoding. A CPU runs the exact
    emulation. `early`: the kernel in front does not write w, so a kernel for few rows may start before it ends
    (kernels/programmatic_launch.py).
    """
    if not x.codes.is_cuda:
        return fp8_gemm_reference(x, w)
    (m, k), n = x.codes.shape, w.codes.shape[0]
    if not has_gluon(x.codes.device):
        return fp8_gemm_nt(x, w, "triton")
    if k % TMA_BYTES:
        return fp8_gemm_nt(x, w, "scaled_mm")
    config = choose_config(m, n, k)
    if config.kernel == "gluon" and m % SCALES_OF_16_BYTES:
        config = plain_config(m)
    if config.kernel not in IN_GLUON:
        return run_config(config, x, w)
    if not gave_up(config):
        try:
            return run_config(config, x, w, early)
        except COMPILER_ERRORS as error:
            give_up(config, error, f"fp8_gemm, {config}")
    return run_config(plain_config(m), x, w)


def fp8_gemm_reference(x: Quantized, w: Quantized) -> Tensor:
    """The exact emulation (fp8/emulated_gemm.py). The tensor core keeps fewer bits inside a block of 128."""
    return fp8_gemm_nt(x, w, "emulated")


# ---------------------------------------------------------------- plain Triton


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "scale_stride"])
def _fp8_gemm_kernel(
    x_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    num_rows,
    num_columns,
    num_blocks,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    width = GROUP * tiles_n
    first_m = tl.program_id(0) // width * GROUP
    inside = tl.program_id(0) % width
    members = tl.minimum(tiles_m - first_m, GROUP)
    start_m, start_n = (first_m + inside % members) * BLOCK_M, inside // members * BLOCK_N
    row_M, column_N = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    x_scale_ptrs = x_scale_ptr + row_M
    w_scale_ptr += start_n // 128 * num_blocks
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, num_blocks, num_stages=STAGES):
        scale_M = tl.load(x_scale_ptrs + block * scale_stride, mask=row_M < num_rows, other=0.0)
        scale_M = scale_M * tl.load(w_scale_ptr + block)
        x_MK = x_desc.load([start_m, block * 128])
        w_NK = w_desc.load([start_n, block * 128])
        if SWAP:
            acc = tl.fma(tl.dot(w_NK, x_MK.T), scale_M[None, :], acc)
        else:
            acc = tl.fma(tl.dot(x_MK, w_NK.T), scale_M[:, None], acc)
    if SWAP:
        acc = acc.T
    inside_MN = (row_M < num_rows)[:, None] & (column_N < num_columns)[None, :]
    y_ptrs = y_ptr + row_M[:, None].to(tl.int64) * num_columns + column_N[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=inside_MN)


def check_operands(x: Quantized, w: Quantized) -> int:
    """The distance between two blocks' scales of x; raises ValueError for a layout that the kernels cannot read."""
    (m, k), n = x.codes.shape, w.codes.shape[0]
    blocks = triton.cdiv(k, BLOCK)
    if w.codes.shape[1] != k or k % TMA_BYTES:
        raise ValueError(f"fp8_gemm: depths {k} and {w.codes.shape[1]} must be one multiple of {TMA_BYTES}")
    if x.scale.shape != (m, blocks) or w.scale.shape != (triton.cdiv(n, BLOCK), blocks):
        raise ValueError(f"fp8_gemm: scales {tuple(x.scale.shape)}, {tuple(w.scale.shape)} do not fit {(m, n, k)}")
    if not (x.codes.is_contiguous() and w.codes.is_contiguous() and w.scale.is_contiguous()):
        raise ValueError("fp8_gemm: codes and the weight's scale must be contiguous")
    if m > 1 and x.scale.stride(0) != 1:
        raise ValueError(f"fp8_gemm: x.scale has strides {x.scale.stride()}, must be (1, M)")
    return x.scale.stride(1) if blocks > 1 else m


def fp8_gemm_triton(x: Quantized, w: Quantized, config: Config, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """One tile a program. Tiles of at least 64 on the MMA's long side, `tile_n` a divisor of 128."""
    scale_stride = check_operands(x, w)
    (m, k), n = x.codes.shape, w.codes.shape[0]
    assert BLOCK % config.tile_n == 0, f"fp8_gemm: {config} would need two weight scales in one tile"
    assert (config.tile_n if config.swap else config.tile_m) >= 64, f"fp8_gemm: {config} would not use wgmma"
    y_MN = torch.empty(m, n, dtype=out_dtype, device=x.codes.device)
    if m == 0:
        return y_MN
    options = {"enable_fp_fusion": False} if x.codes.is_cuda else {}
    _fp8_gemm_kernel[(triton.cdiv(m, config.tile_m) * triton.cdiv(n, config.tile_n),)](
        TensorDescriptor(x.codes, [m, k], [k, 1], [config.tile_m, BLOCK]),
        TensorDescriptor(w.codes, [n, k], [k, 1], [config.tile_n, BLOCK]),
        x.scale, w.scale, y_MN, m, n, triton.cdiv(k, BLOCK), scale_stride,
        BLOCK_M=config.tile_m, BLOCK_N=config.tile_n, GROUP=config.group, SWAP=config.swap, STAGES=config.stages,
        num_warps=config.warps, **options,
    )  # fmt: skip
    return y_MN


# ---------------------------------------------------------------- the backend "triton", where cuBLASLt has no such GEMM


def triton_nt(x: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    """The plain kernel at every M, N and K. x and w in any layout of scales, w's codes contiguous."""
    x, w = addressable(x, w)
    if x.codes.shape[0] > 1 and x.scale.stride(0) != 1:
        x = Quantized(x.codes, x.scale.t().contiguous().t())
    config = plain_config(min(x.codes.shape[0], LARGEST_WITHOUT_ENTRY))
    return fp8_gemm_triton(x, Quantized(w.codes, w.scale.contiguous()), config, out_dtype)


def addressable(x: Quantized, w: Quantized) -> tuple[Quantized, Quantized]:
    """Both with rows of codes that TMA can address: zeros are added along K, which change no sum."""
    missing = -x.codes.shape[1] % TMA_BYTES
    if not missing:
        return x, w
    padded = (F.pad(one.codes.view(torch.uint8), (0, missing)).view(one.codes.dtype) for one in (x, w))
    x, w = (Quantized(codes, one.scale) for codes, one in zip(padded, (x, w), strict=True))
    return x, w


def triton_wgrad(dy_tokens: Quantized, x_tokens: Quantized, out_dtype: torch.dtype) -> Tensor:
    """UserError: x is not quantised in square blocks."""
    if not is_square(x_tokens):
        raise UserError("fp8.wgrad_blocks: 'tokens' has no GEMM on this GPU, which is not Hopper; use 'square'")
    return triton_nt(dy_tokens, x_tokens, out_dtype)


BACKENDS["triton"] = Backend(nt=triton_nt, dgrad=triton_nt, wgrad=triton_wgrad)
