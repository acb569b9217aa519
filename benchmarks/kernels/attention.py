"""Attention alone, one layer, in every format of the KV cache: decode, prefill, and the packed forward and backward.

    python -m benchmarks.kernels.attention [--out FOLDER]

32 query heads, 8 kv heads, head size 128, pages of 128 keys, random values. Decode is counted in bytes of K and V (and
their scales) a second, all else in floating-point operations under the causal mask, a backward as 2.5 forwards. The
packed forward includes the replay of the cache. Times are medians over replays of a CUDA graph; what a call reads is
far larger than L2.

A workload is `sequences x context`, for prefill `sequences x context-before + chunk`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.testing import do_bench_cudagraph

from benchmarks.record import RESULTS, write_result
from octetrl.fp8.format import E4M3
from octetrl.kernels.attention_order import KVMode
from octetrl.kernels.attention_packed import attention_packed_forward
from octetrl.kernels.attention_packed_backward import attention_packed_backward_triton
from octetrl.kernels.attention_paged import attention_paged
from octetrl.kernels.kv_store import kv_replay

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 32, 8, 128, 128
SCALE = HEAD_SIZE**-0.5
CACHES: dict[str, tuple[KVMode, bool]] = {  # kv_mode, and whether K is quantised too
    "bf16": ("none", False),
    "fp8_calibrated": ("calibrated", True),
    "fp8_dynamic": ("dynamic", True),
    "fp8_v_calibrated": ("calibrated", False),
    "fp8_v_dynamic": ("dynamic", False),
}
DECODE = [(128, 2560), (256, 1024), (16, 8192)]  # sequences, context
PREFILL = [(4, 0, 4096), (16, 2048, 512)]  # sequences, context before, chunk
PACKED = [(16, 1024), (4, 4096), (1, 16384)]  # sequences, length

Row = dict[str, object]
Timer = Callable[[Callable[[], Any]], float]


def median_us(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()  # the capture runs on a stream of its own, which would not wait for the inputs
    return 1e3 * do_bench_cudagraph(call, rep=50, return_mode="median")


def paged_call(
    kv_mode: KVMode, quantize_k: bool, sequences: int, context: int, queries: int, device: str
) -> tuple[Callable[[], Tensor], int]:
    """A call of the engine's attention with `queries` new tokens a sequence, and the bytes of K and V that it reads."""
    pages = -(-context // PAGE_SIZE)
    shape = (sequences * pages, KV_HEADS, PAGE_SIZE, HEAD_SIZE)
    v_dtype = torch.bfloat16 if kv_mode == "none" else E4M3
    k_dtype = E4M3 if quantize_k else torch.bfloat16
    k_cache = torch.randn(shape, dtype=torch.bfloat16, device=device).to(k_dtype)
    v_cache = torch.randn(shape, dtype=torch.bfloat16, device=device).to(v_dtype)

    def scales(cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
        by_head, by_token = torch.ones(KV_HEADS, device=device), torch.ones(shape[:3], device=device)
        if cache.dtype != E4M3:
            return None, None
        return (None, by_token) if kv_mode == "dynamic" else (by_head, None)

    (k_scale, k_token_scale), (v_scale, v_token_scale) = scales(k_cache), scales(v_cache)
    table = torch.randperm(sequences * pages, device=device).view(sequences, pages).int()
    q = torch.randn(sequences * queries, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
    cu_seqlens = torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32, device=device)
    contexts = torch.full((sequences,), context, dtype=torch.int32, device=device)
    row_bytes = (k_cache.element_size() + v_cache.element_size()) * HEAD_SIZE
    row_bytes += 4 * sum(scale is not None for scale in (k_token_scale, v_token_scale))

    def call() -> Tensor:
        tables = (q, k_cache, v_cache, table, cu_seqlens, contexts)
        return attention_paged(*tables, SCALE, k_scale, v_scale, k_token_scale, v_token_scale, queries)

    return call, sequences * context * KV_HEADS * row_bytes


def causal_flops(sequences: int, before: int, queries: int) -> int:
    """Of both GEMMs of a forward: query i of a chunk meets before + i + 1 keys."""
    return 4 * HEADS * HEAD_SIZE * sequences * (queries * before + queries * (queries + 1) // 2)


def engine_rows(precision: str, device: str, timer: Timer) -> Iterator[Row]:
    kv_mode, quantize_k = CACHES[precision]
    for sequences, context in DECODE:
        call, read = paged_call(kv_mode, quantize_k, sequences, context, 1, device)
        us = timer(call)
        workload = f"{sequences}x{context}"
        yield {"precision": precision, "op": "decode", "workload": workload, "us": us, "tb_per_s": read / us / 1e6}
    for sequences, before, chunk in PREFILL:
        call, _ = paged_call(kv_mode, quantize_k, sequences, before + chunk, chunk, device)
        us = timer(call)
        tflops = causal_flops(sequences, before, chunk) / us / 1e6
        workload = f"{sequences}x{before}+{chunk}"
        yield {"precision": precision, "op": "prefill", "workload": workload, "us": us, "tflop_per_s": tflops}


def trainer_rows(precision: str, device: str, timer: Timer) -> Iterator[Row]:
    kv_mode, quantize_k = CACHES[precision]
    for sequences, length in PACKED:
        tokens = sequences * length
        heads = (HEADS, KV_HEADS, KV_HEADS)
        fused = torch.randn(tokens, sum(heads), HEAD_SIZE, dtype=torch.bfloat16, device=device)
        q, k, v = fused.split(heads, dim=1)
        k_scale, v_scale = (x.float().abs().amax((0, 2)) / 448 for x in (k, v))
        cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        replay = (k_scale, v_scale, kv_mode, quantize_k)
        out, lse2 = attention_packed_forward(q, k, v, cu_seqlens, length, SCALE, *replay)
        kv = kv_replay(k, v, kv_mode, k_scale, v_scale, quantize_k)
        calls: dict[str, Callable[[], Any]] = {
            "packed forward": partial(attention_packed_forward, q, k, v, cu_seqlens, length, SCALE, *replay),
            "packed backward": partial(
                attention_packed_backward_triton, out, q, kv, out, lse2, cu_seqlens, length, SCALE
            ),
        }
        for (op, call), share in zip(calls.items(), (1.0, 2.5), strict=True):
            us = timer(call)
            tflops = share * causal_flops(sequences, 0, length) / us / 1e6
            workload = f"{sequences}x{length}"
            yield {"precision": precision, "op": op, "workload": workload, "us": us, "tflop_per_s": tflops}


def show(rows: list[Row]) -> None:
    columns = ("precision", "op", "workload", "us", "tb_per_s", "tflop_per_s")
    table = Table(*columns, title="attention, one layer")
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        print("benchmarks.kernels.attention: no Hopper GPU here; run it on one", file=sys.stderr)
        raise SystemExit(2)
    torch.manual_seed(0)
    rows = [
        row
        for precision in CACHES
        for side in (engine_rows, trainer_rows)
        for row in side(precision, "cuda", median_us)
    ]
    show(rows)
    print(f"wrote {write_result('kernels', 'attention', rows, arguments.out)}")


if __name__ == "__main__":
    main()
