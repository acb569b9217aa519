"""Times the GEMMs of decoding, and with --tune chooses their kernels again.

Without --tune: the present table's kernels beside `scaled_mm` and BF16 `F.linear`. With it every candidate is held to
the bits that the same rows have in a large batch, those that differ are dropped, and the fastest goes into
`fp8_gemm_table.json`: in place, or in the folder of `--out`. A BF16 weight gets entries
for all sizes if F.linear's rows change with the batch, which is cuBLAS splitting K. Otherwise it gets those of the
kernel for few rows, up to the first size where F.linear is faster. That kernel starts early, as in a rollout.

Times are medians over replays of a CUDA graph that walks through copies of the weight, more than 220 MB of them, so
that none is found in L2. The floor of a time is that of its bytes at 4.3 TB/s, or of its operations at 1.5 PFLOP/s
(FP8; half in BF16).

M rows, N columns, K depth of the GEMM.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.kernels.clock import ROTATED_BYTES, Row, quick_median_us
from lab.record import RESULTS
from octetrl.bench.rows import MEMORY_BYTES_PER_SECOND
from octetrl.fp8.backends import fp8_gemm_nt
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm, bf16_gemm_triton, straight_config
from octetrl.kernels.gemm.few_rows_gluon import SHARED_LIMIT, FewRows
from octetrl.kernels.gemm.fp8_gemm import (
    SCALED_MM,
    SMALLEST_SCALED_MM,
    TABLE,
    Config,
    choose_config,
    few_rows_variant,
    fp8_gemm,
    gemm_table,
    run_config,
    run_few_rows_bf16,
)
from octetrl.kernels.programmatic_launch import MOST_ROWS
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.shapes.presets import PRESETS, preset_config

MODELS = [name for name in PRESETS if name != "tiny"]
SIZES = "1,8,16,32,64,128,192,256"
LARGE_BATCH = 4096  # rows; cuBLAS splits nothing here
FP8_PER_US = 1.5e9

DEVICE = "cuda"

triton, gluon, straight = (partial(Config, kernel) for kernel in ("triton", "gluon", "straight"))


# The kernel for few rows: w_rows, stages and panels, by the rows of x in a panel; SWAPPED: w on the MMA's long side.
SWAPPED = {
    8: ((32, 8, 4), (32, 4, 4), (32, 4, 8), (64, 5, 4), (64, 5, 2), (64, 3, 2), (16, 6, 4)),
    16: ((32, 8, 4), (32, 4, 4), (64, 5, 4), (64, 5, 2), (64, 3, 2), (16, 6, 4)),
    32: ((32, 6, 4), (32, 3, 4), (32, 5, 2), (64, 4, 4), (64, 4, 2)),
    64: ((64, 3, 4), (64, 3, 2)),
}
PLAIN = {8: (), 16: ((32, 4, 4),), 32: ((32, 5, 2),), 64: ((32, 4, 4), (32, 4, 2), (64, 3, 2), (128, 4, 2))}


def variants(rows: int) -> list[FewRows]:
    """Those whose panel of x is the smallest that holds `rows`."""
    tokens = next(size for size in SWAPPED if rows <= size)
    forms = [(sizes, True) for sizes in SWAPPED[tokens]] + [(sizes, False) for sizes in PLAIN[tokens]]
    return [FewRows(w, tokens, stages, panels, swap, False) for (w, stages, panels), swap in forms]


def few_rows_candidates(m: int) -> list[Config]:
    """For both precisions. None beyond the kernel's 64 rows."""
    found = variants(m) if m <= MOST_ROWS else []
    return [Config("few_rows", one.tokens, one.w_rows, one.stages, group=one.panels, swap=one.swap) for one in found]


def fp8_candidates(m: int) -> list[Config]:
    """Tiles m x n and stages. One row of tiles as long as M allows; few columns where N is small; deep rings."""
    if m <= 64:
        tile = 16 if m <= 16 else 32 if m <= 32 else 64
        sizes = ((64, 4), (64, 6), (64, 10), (128, 3), (128, 5))
        swapped = [triton(tile, columns, stages, swap=True) for columns, stages in sizes]
        plain = [triton(64, 64, 4), triton(64, 64, 6), triton(64, 32, 8), triton(64, 128, 4)]
        rings = [gluon(64, 32, 12), gluon(64, 32, 18), gluon(64, 64, 8), gluon(64, 64, 12)]
        ours = [*swapped, *plain, *rings, *few_rows_candidates(m)]
    elif m <= 128:
        plain = [triton(128, 64, 3), triton(128, 64, 4), triton(128, 32, 6), triton(64, 128, 4, group=2)]
        rings = [gluon(128, 32, 10), gluon(128, 64, 6), gluon(128, 64, 8), gluon(128, 128, 6), gluon(64, 64, 12)]
        ours = [*plain, *rings, gluon(64, 128, 8, group=2), gluon(64, 64, 12, group=2)]
    else:
        plain = [triton(128, 64, 3, group=2), triton(128, 64, 4, group=2), triton(128, 64, 3)]
        rings = [gluon(128, 64, 8, group=2), gluon(128, 128, 6, group=2), gluon(128, 32, 10, group=2)]
        ours = [*plain, *rings, gluon(128, 64, 8), gluon(64, 128, 8, group=4), gluon(64, 64, 12, group=4)]
    return [*ours, SCALED_MM] if m >= SMALLEST_SCALED_MM else ours


def bf16_candidates(m: int) -> list[Config]:
    if m <= 64:
        tiles = [straight(64, 32, stages, tile_k=128) for stages in (4, 6, 8)]
        tiles += [straight(64, 32, 10, tile_k=64), straight(64, 64, 4, tile_k=128), straight(64, 64, 8, tile_k=64)]
        tiles += [straight(16, 32, stages, tile_k=128) for stages in (5, 8) if m <= 16]
        return [*tiles, *few_rows_candidates(m)]
    wide = [straight(128, 64, 4, tile_k=64), straight(128, 64, 6, tile_k=64), straight(128, 64, 3, tile_k=128)]
    wide += [straight(128, 32, 8, tile_k=64), straight(128, 32, 5, tile_k=128), straight(64, 64, 6, tile_k=64)]
    return [*wide, straight(128, 128, 4, tile_k=64, warps=8)]


def weights_of(models: Iterable[str]) -> dict[tuple[int, int], str]:
    """(N, K) of the linears of these models' layers, with where each is found."""
    found: dict[tuple[int, int], str] = {}
    for model in models:
        config = preset_config(model)
        hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config.get("head_dim", 128)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        for name, shape in {
            "qkv": ((heads + 2 * kv_heads) * size, hidden),
            "o": (hidden, heads * size),
            "gate_up": (2 * ffn, hidden),
            "down": (hidden, ffn),
        }.items():
            found.setdefault(shape, f"{model} {name}")
    return found


# ---------------------------------------------------------------- compiling ahead


def compile_config(config: Config) -> str | None:
    """In a worker: fill Triton's cache for `config` on a small product; what the compiler said if it failed."""
    try:
        if config.kernel == "straight":
            values = torch.zeros(256, 512, dtype=torch.bfloat16, device=DEVICE)
            bf16_gemm_triton(values, values, config)
        elif config.kernel == "few_rows":
            values = torch.zeros(config.tile_m, 512, dtype=torch.bfloat16, device=DEVICE)
            w_NK = torch.zeros(256, 512, dtype=torch.bfloat16, device=DEVICE)
            run_few_rows_bf16(config, values, w_NK, early=True)
            run_config(config, quantize_activation(values), quantize_weight(w_NK), early=True)
        elif config != SCALED_MM:
            codes = torch.zeros(256, 512, dtype=torch.float8_e4m3fn, device=DEVICE)
            scale_KM, w_scale = torch.ones(4, 256, device=DEVICE), torch.ones(2, 4, device=DEVICE)
            run_config(config, Quantized(codes, scale_KM.t()), Quantized(codes.clone(), w_scale))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def compiled(configs: Sequence[Config]) -> set[Config]:
    """Those that compile. Workers fill Triton's cache in parallel, so that timing need not wait for the compiler."""
    workers = max(1, min(16, (os.cpu_count() or 1), len(configs)))
    with get_context("spawn").Pool(workers) as pool:
        failures = pool.map(compile_config, configs, chunksize=1)
    for config, failure in zip(configs, failures, strict=True):
        if failure is not None:
            print(f"FAIL does not compile: {config.as_json()}: {failure}")
    return {config for config, failure in zip(configs, failures, strict=True) if failure is None}


# ---------------------------------------------------------------- one weight


class Weight:
    """A weight in both precisions, its copies, and the rows that a large batch has."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        generator = torch.Generator(device=DEVICE).manual_seed(n + k)
        self.x_MK = torch.randn(LARGE_BATCH, k, generator=generator, device=DEVICE).bfloat16()
        w_NK = torch.randn(n, k, generator=generator, device=DEVICE).bfloat16()
        w = quantize_weight(w_NK)
        self.bf16 = [w_NK] + [w_NK.clone() for _ in range(int(ROTATED_BYTES / (2 * n * k)))]
        self.fp8 = [w] + [Quantized(w.codes.clone(), w.scale) for _ in range(int(ROTATED_BYTES / (n * k)))]
        self.large_fp8 = fp8_gemm_nt(quantize_activation(self.x_MK), w, "scaled_mm")
        self.large_bf16 = F.linear(self.x_MK, w_NK)
        self.shape = f"{n}x{k}"

    def x_fp8(self, m: int) -> Quantized:
        return quantize_activation(self.x_MK[:m])

    def floor_us(self, precision: str, m: int) -> float:
        size = 1 if precision == "fp8" else 2
        read = size * self.k * (self.n + m) + 2 * m * self.n
        return max(read * 1e6 / MEMORY_BYTES_PER_SECOND, 2 * m * self.n * self.k * size / FP8_PER_US)

    def row(self, op: str, m: int, us: float, kernel: str) -> Row:
        precision = "bf16" if op in ("F.linear", "bf16_gemm") else "fp8"
        read = self.n * self.k * (2 if precision == "bf16" else 1)
        gemm = {"precision": precision, "op": op, "workload": f"{self.shape} M={m}", "kernel": kernel, "us": us}
        return {**gemm, "tb_per_s": read / us / 1e6, "of_floor": self.floor_us(precision, m) / us}


def verdict(right: int, of: int, what: str) -> None:
    print(f"{'OK  ' if right == of else 'FAIL'} {right} of {of} {what}", flush=True)


# ---------------------------------------------------------------- choosing


def fastest(
    candidates: Iterable[Config], run: Callable[[Config, int], Tensor], copies: int, expected_MN: Tensor
) -> tuple[Config, float] | None:
    """The fastest candidate that has the expected bits, and its time; `run(config, copy of the weight)`."""
    best = None
    for config in candidates:
        if not torch.equal(run(config, 0), expected_MN):
            print(f"FAIL other bits, dropped: {config.as_json()}")
            continue
        us = quick_median_us([partial(run, config, copy) for copy in range(copies)])
        if best is None or us < best[1]:
            best = (config, us)
    return best


def tune_fp8(weight: Weight, sizes: Sequence[int], usable: set[Config]) -> dict[str, object]:
    entries: dict[int, Config] = {}
    for m in sizes:
        x = weight.x_fp8(m)

        def run(config: Config, copy: int, x: Quantized = x) -> Tensor:
            return run_config(config, x, weight.fp8[copy], early=True)

        candidates = [config for config in fp8_candidates(m) if config in usable and may_run(config, weight.k, "fp8")]
        best = fastest(candidates, run, len(weight.fp8), weight.large_fp8[:m])
        if best is not None:
            entries[m] = best[0]
            print(f"     fp8 {weight.shape} M={m}: {best[1]:.1f} us, {best[0].as_json()}", flush=True)
    return written(entries)


def may_run(config: Config, k: int, precision: str) -> bool:
    """Whether the kernel takes this K; the one for few rows keeps all scales of FP8 in shared memory."""
    if config.kernel == "few_rows":
        fp8 = precision == "fp8"
        return k % (128 if fp8 else 64) == 0 and few_rows_variant(config).shared_bytes(k, fp8) <= SHARED_LIMIT
    return config.kernel != "gluon" or k % 256 == 0


def tune_bf16(weight: Weight, sizes: Sequence[int], usable: set[Config]) -> dict[str, object]:
    """Entries for all sizes if F.linear's rows change with the batch, else of the kernel for few rows where it is
    faster than F.linear: `straight_config` gives a weight with such entries alone to F.linear beyond the last."""
    w_NK = weight.bf16[0]
    split = [m for m in sizes if not torch.equal(F.linear(weight.x_MK[:m], w_NK), weight.large_bf16[:m])]
    print(f"     bf16 {weight.shape}: F.linear changes bits at M = {split or 'none'}", flush=True)
    entries: dict[int, Config] = {}
    for m in sizes:
        x_MK = weight.x_MK[:m]

        def run(config: Config, copy: int, x_MK: Tensor = x_MK) -> Tensor:
            if config.kernel == "few_rows":
                return run_few_rows_bf16(config, x_MK, weight.bf16[copy], early=True)
            return bf16_gemm_triton(x_MK, weight.bf16[copy], config)

        found = bf16_candidates(m) if split else few_rows_candidates(m)
        candidates = [config for config in found if config in usable and may_run(config, weight.k, "bf16")]
        best = fastest(candidates, run, len(weight.bf16), weight.large_bf16[:m])
        if not split and (best is None or best[1] >= linear_us(weight, x_MK)):
            break
        if best is not None:
            entries[m] = best[0]
            print(f"     bf16 {weight.shape} M={m}: {best[1]:.1f} us, {best[0].as_json()}", flush=True)
    return written(entries)


def linear_us(weight: Weight, x_MK: Tensor) -> float:
    return quick_median_us([partial(F.linear, x_MK, w_NK) for w_NK in weight.bf16])


def written(entries: dict[int, Config]) -> dict[str, object]:
    """As the table has them: a size that the next larger one serves just so is left out."""
    sizes = sorted(entries)
    following = [*sizes[1:], None][: len(sizes)]
    kept = [m for m, after in zip(sizes, following, strict=True) if after is None or entries[m] != entries[after]]
    return {str(m): entries[m].as_json() for m in kept}


def tune(weights: dict[tuple[int, int], str], sizes: Sequence[int], path: Path) -> None:
    """Choose for these weights and write the table, whose other entries stay."""
    configs = {config for m in sizes for config in (*fp8_candidates(m), *bf16_candidates(m))}
    usable = compiled(sorted(configs))
    table = json.loads(json.dumps(gemm_table()))
    for (n, k), name in weights.items():
        print(f"---- {name}: {n}x{k}")
        weight = Weight(n, k)
        for kind, entries in (("fp8", tune_fp8(weight, sizes, usable)), ("bf16", tune_bf16(weight, sizes, usable))):
            table[kind].pop(weight.shape, None)
            if entries:
                table[kind][weight.shape] = entries
        path.write_text(table_text(table), encoding="utf-8")
    print(f"wrote {path}")


def table_text(table: Mapping[str, Any]) -> str:
    """The table as JSON text, one entry on each line."""
    kinds = []
    for kind, weights in table.items():
        shapes = []
        for shape, entries in weights.items():
            lines = [f'   "{m}": {json.dumps(entries[m])}' for m in sorted(entries, key=int)]
            shapes.append(f'  "{shape}": {{\n' + ",\n".join(lines) + "\n  }")
        kinds.append(f' "{kind}": {{\n' + ",\n".join(shapes) + "\n }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"


# ---------------------------------------------------------------- measuring


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows of the present table's kernels; none with `--tune`, which writes the table."""
    weights = weights_of(arguments.shapes.split(","))
    sizes = sorted({int(m) for m in arguments.m.split(",")})
    if arguments.tune:
        tune(weights, sizes, TABLE if arguments.out == RESULTS else arguments.out / TABLE.name)
        return []
    return [row for (n, k) in weights for row in measured(Weight(n, k), sizes)]


def measured(weight: Weight, sizes: Sequence[int]) -> list[Row]:
    """The present table's kernels: checked, then timed beside cuBLAS's."""
    rows: list[Row] = []
    right_fp8 = right_bf16 = 0
    for m in sizes:
        x, x_MK = weight.x_fp8(m), weight.x_MK[:m]
        chosen, straight_one = choose_config(m, weight.n, weight.k), straight_config(m, weight.n, weight.k)
        right_fp8 += torch.equal(fp8_gemm(x, weight.fp8[0]), weight.large_fp8[:m])
        right_bf16 += torch.equal(bf16_gemm(x_MK, weight.bf16[0]), weight.large_bf16[:m])
        label = " ".join(str(value) for value in chosen.as_json().values())
        rows.append(weight.row("fp8_gemm", m, quick_median_us([partial(fp8_gemm, x, w) for w in weight.fp8]), label))
        us = quick_median_us([partial(fp8_gemm_nt, x, w, "scaled_mm") for w in weight.fp8])
        rows.append(weight.row("scaled_mm", m, us, "cuBLAS"))
        rows.append(weight.row("F.linear", m, linear_us(weight, x_MK), "cuBLAS"))
        if straight_one is not None:
            label = " ".join(str(value) for value in straight_one.as_json().values())
            rows.append(
                weight.row("bf16_gemm", m, quick_median_us([partial(bf16_gemm, x_MK, w) for w in weight.bf16]), label)
            )
    verdict(right_fp8, len(sizes), f"sizes of fp8 {weight.shape} have the bits of scaled_mm at M={LARGE_BATCH}")
    verdict(right_bf16, len(sizes), f"sizes of bf16 {weight.shape} have the bits of F.linear at M={LARGE_BATCH}")
    return rows
