"""Compiles the products of experts and of heads for Hopper, on a machine without a GPU. One line each: its name, the
number of its stores of one element, and of those of 16 bytes.

    python -m tests.unit.kernels.compile_stores
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.grouped_bf16_gemm import (
    NARROW_WGRAD,
    WIDE_WGRAD,
    Part,
    grouped_bf16_gemm_triton,
    grouped_wgrad_triton,
)
from octetrl.kernels.gemm.grouped_fp8_gemm import OWNED, grouped_fp8_gemm_triton
from octetrl.kernels.gemm.head_gemm import CODES_TILES, head_gemm_codes_triton, head_gemm_triton
from octetrl.kernels.quantize.quantize_activation import empty_rows
from tests.unit.kernels.offline import OfflineDriver, zeros

ROWS, EXPERTS, COLUMNS, DEPTH, HEADS, LATENT = 300, 4, 384, 256, 4, 256


def count_stores() -> None:
    triton.runtime.driver.set_active(OfflineDriver(90))
    launch = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        lines = [line for line in compiled.asm["ptx"].splitlines() if "st.global" in line]
        scalar = sum(".b16" in line or ".b8" in line for line in lines)
        print(kernel.__name__, scalar, sum(".v4.b32" in line for line in lines))
        return compiled

    JITFunction.run = run


def compile_all() -> None:
    first_X1 = torch.arange(EXPERTS + 1, dtype=torch.int32)
    codes, scale = empty_rows(ROWS, DEPTH, torch.device("cpu"))
    x = Quantized(codes.view(torch.float8_e4m3fn), scale)
    w_codes = zeros(EXPERTS * COLUMNS, DEPTH, dtype=torch.float8_e4m3fn)
    w = Quantized(w_codes, zeros(EXPERTS * COLUMNS // 128, DEPTH // 128, dtype=torch.float32))
    for tile in OWNED.values():
        grouped_fp8_gemm_triton(x, w, first_X1, tile)
    grouped_bf16_gemm_triton(zeros(ROWS, DEPTH), zeros(EXPERTS * COLUMNS, DEPTH), first_X1)
    for wgrad_tile in (WIDE_WGRAD, NARROW_WGRAD):
        grouped_wgrad_triton(zeros(ROWS, COLUMNS), zeros(ROWS, DEPTH), first_X1, torch.bfloat16, wgrad_tile)
    o_THC, kv_b = zeros(ROWS, HEADS, LATENT), zeros(HEADS * 256, LATENT)
    head_gemm_triton(o_THC, kv_b, part=Part(128))
    for tile in CODES_TILES:
        head_gemm_codes_triton(o_THC, kv_b, part=Part(128), tile=tile)


if __name__ == "__main__":
    count_stores()
    compile_all()
