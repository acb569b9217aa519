"""The packed attention backward: our kernels in several tiles, and FlashAttention-2's in torch.

    python -m lab.kernels.attention_backward [--out FOLDER]

First every candidate's dQ, dK and dV on a small ragged pack are compared with float64 autograd over the K and V that
the forward saw, in every format of the cache; a relative error above 1% fails, and so do bits that differ from one run
to the next (except FlashAttention's) and rows past the last sequence that are not zero.

Then the times of 16,384 tokens, 32 query heads, 8 kv heads, head size 128, BF16, in several packs. TFLOP/s count the
causal half of the GEMMs needed, 2 * H * D * sum(L * (L + 1) / 2) floating-point operations each: two a forward, five a
backward. One kernel of ours is counted by the GEMMs that it does: three for dq, four for dkdv; so to compare these with
the whole, multiply the harmonic mean by 5/7. Whatever is read is larger than L2, which is flushed between calls too.
FlashAttention gets K and V dequantised and rounded to BF16. cuDNN's packed backward is not here: torch up to 2.12 takes
the head size for the longest sequence in it, and writes past a buffer wherever a sequence is longer.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.testing import do_bench

from lab.record import RESULTS, need_hopper, write_result
from octetrl.kernels.attention.attention_backward_tiles import BackwardTiles, Tile, backward_tiles
from octetrl.kernels.attention.attention_packed import attention_packed_forward_triton
from octetrl.kernels.attention.attention_packed_backward import (
    attention_packed_backward_triton,
    launch_dkdv,
    launch_dq,
    operands_of,
)
from octetrl.kernels.attention.kv_store import ReplayedKV, kv_replay
from octetrl.shapes.blocks import KVMode, KVTensors

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
CACHES: dict[str, tuple[KVMode, KVTensors]] = {  # kv_mode, and what is quantised
    "bf16": ("none", "both"),
    "fp8_calibrated": ("calibrated", "both"),
    "fp8_dynamic": ("dynamic", "both"),
    "fp8_v_calibrated": ("calibrated", "v"),
}
PACKS: dict[str, list[int]] = {
    "1x16384": [16384],
    "4x4096": [4096] * 4,
    "8x2048": [2048] * 8,
    "16x1024": [1024] * 16,
    "ragged 300..4600": [300, 4600, 950, 3100, 1700, 2234, 700, 2800],
}
DQ_TILES = [
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 8, 3, 1),
    Tile(128, 128, 8, 2),
    Tile(64, 64, 4, 2),
    Tile(64, 128, 4, 2),
]
DKDV_TILES = [
    Tile(64, 128, 8, 2),
    Tile(64, 128, 8, 3),
    Tile(64, 128, 8, 3, 1),
    Tile(32, 128, 8, 3),
    Tile(64, 64, 4, 2),
    Tile(32, 64, 4, 3),
]
LIMIT = 1e-2

Row = dict[str, object]


class Case(NamedTuple):
    """What a backward takes, in its order."""

    dout: Tensor
    q: Tensor
    kv: ReplayedKV
    out: Tensor
    lse2: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    scale: float


def case_of(lengths: list[int], heads: tuple[int, int], head_size: int, cache: str = "bf16", rest: int = 0) -> Case:
    """A random pack, `rest` rows longer than its sequences."""
    kv_mode, quantized = CACHES[cache]
    tokens = sum(lengths) + rest
    split = (heads[0], heads[1], heads[1])
    fused = torch.randn(tokens, sum(split), head_size, dtype=torch.bfloat16, device="cuda")
    q, k, v = fused.split(split, dim=1)
    k_scale, v_scale = (x.float().abs().amax((0, 2)) * 0.9 / 448 for x in (k, v))
    kv = kv_replay(k, v, kv_mode, k_scale, v_scale, quantized)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    tables = (cu_seqlens, max(lengths), head_size**-0.5)
    out, lse2 = attention_packed_forward_triton(q, kv, *tables)
    return Case(torch.randn_like(out), q, kv, out, lse2, *tables)


# ---------------------------------------------------------------- errors


def expected(case: Case, lengths: list[int]) -> list[Tensor]:
    """Gradients by float64 autograd over what the forward saw."""

    def seen(x: Tensor, scale: Tensor | None) -> Tensor:
        return x.double() if scale is None else x.double() * scale.double()[..., None]

    k, v = seen(case.kv.k_TKD, case.kv.k_scale), seen(case.kv.v_TKD, case.kv.v_scale)
    inputs = [x.detach().clone().requires_grad_() for x in (case.q.double(), k, v)]
    group = case.q.shape[1] // k.shape[1]
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        q, k, v = (x[rows].transpose(0, 1) for x in inputs)
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        p = (q @ k.mT * case.scale).masked_fill(future, float("-inf")).softmax(-1)
        (p @ v * case.dout[rows].transpose(0, 1).double()).sum().backward()
    return [x.grad for x in inputs if x.grad is not None]


def candidates() -> dict[str, Callable[..., Any]]:
    ours: dict[str, Callable[..., Any]] = {"triton": attention_packed_backward_triton}
    return ours | {"flash": flash_backward}


def flash_backward(
    dout: Tensor, q: Tensor, kv: ReplayedKV, out: Tensor, lse2_TH: Tensor, bounds: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention-2's packed form, fed with our output and log-sum-exp. Its dQ is summed by atomics."""
    k, v = (
        x.to(torch.bfloat16) if s is None else (x.float() * s[..., None]).to(torch.bfloat16)
        for x, s in ((kv.k_TKD, kv.k_scale), (kv.v_TKD, kv.v_scale))
    )
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout, of which there is none
    lse_HT = (lse2_TH * math.log(2.0)).t().contiguous()
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, lse_HT, bounds, bounds, longest, longest, 0.0, True, unused,
        torch.empty(0, device=q.device), scale=scale,
    )  # fmt: skip
    for gradient in gradients:
        gradient[int(bounds[-1]) :] = 0
    return gradients


def tiled() -> Iterator[tuple[str, Callable[..., Any]]]:
    for tiles in map(BackwardTiles, DQ_TILES, DKDV_TILES):
        yield (
            f"triton {name_of(tiles.dq)} {name_of(tiles.dkdv)}",
            partial(attention_packed_backward_triton, tiles=tiles),
        )


def name_of(tile: Tile) -> str:
    return f"{tile.queries}x{tile.keys} w{tile.warps} s{tile.stages}/{tile.masked_stages}"


def check(name: str, backward: Callable[..., Any], case: Case, wants: list[Tensor], used: int) -> bool:
    """Prints one line; whether all is right."""
    try:
        got, again = backward(*case), backward(*case)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"FAIL {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return False
    errors = [float((g[:used].double() - w[:used]).norm() / w[:used].norm()) for g, w in zip(got, wants, strict=True)]
    rest = sum(int(g[used:].count_nonzero()) for g in got)
    differing = sum(int((g != a).sum()) for g, a in zip(got, again, strict=True))
    repeats = differing == 0 or "flash" in name
    right = max(errors) < LIMIT and rest == 0 and repeats
    print(
        f"{'OK' if right else 'FAIL'} {name}: relative errors dq {errors[0]:.2e} dk {errors[1]:.2e} dv {errors[2]:.2e},"
        f" {rest} values past the end, {differing} differ from run to run"
    )
    return right


def check_all() -> bool:
    lengths, rest = [1, 127, 129, 500, 64, 0, 300], 37
    right = True
    for cache, head_size in itertools.product(CACHES, (64, 128)):
        case = case_of(lengths, (8, 2), head_size, cache, rest)
        wants = expected(case, lengths)
        every = list(candidates().items())
        if cache == "bf16" and head_size == 128:
            every = [*tiled(), *every]
        for name, backward in every:
            right &= check(f"{cache} head {head_size} {name}", backward, case, wants, sum(lengths))
    return right


# ---------------------------------------------------------------- times


def gemm_flops(lengths: list[int]) -> int:
    """Of one GEMM under the causal mask."""
    return 2 * HEADS * HEAD_SIZE * sum(length * (length + 1) // 2 for length in lengths)


def pack_rows(pack: str, lengths: list[int]) -> Iterator[Row]:
    case = case_of(lengths, (HEADS, KV_HEADS), HEAD_SIZE)
    tables = (case.cu_seqlens, case.max_seqlen, case.scale)
    operands = operands_of(case.dout, case.q, case.kv, case.cu_seqlens, case.scale)
    launch_dq(operands, case.out, case.lse2, DQ_TILES[0], case.max_seqlen)
    calls: dict[str, tuple[int, Callable[..., Any]]] = {  # name: GEMMs counted, call
        "forward": (2, partial(attention_packed_forward_triton, case.q, case.kv, *tables))
    }
    for tile in DQ_TILES:
        calls[f"dq {name_of(tile)}"] = (3, partial(launch_dq, operands, case.out, case.lse2, tile, case.max_seqlen))
    for tile in DKDV_TILES:
        calls[f"dkdv {name_of(tile)}"] = (4, partial(launch_dkdv, operands, tile))
    for name, backward in candidates().items():
        calls[f"backward {name}"] = (5, partial(backward, *case))
    for op, (gemms, call) in calls.items():
        try:
            us = 1e3 * float(do_bench(call, warmup=10, rep=60, return_mode="median"))
        except Exception as error:
            print(f"FAIL {pack} {op}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        speed = gemms * gemm_flops(lengths) / us / 1e6
        yield {"precision": "bf16", "workload": pack, "op": op, "us": us, "tflop_per_s": speed}


def show(rows: list[Row]) -> None:
    table = Table("op", *PACKS, title="TFLOP/s (us)")
    cells = {(row["op"], row["workload"]): f"{row['tflop_per_s']:.0f} ({row['us']:.0f})" for row in rows}
    for op in dict.fromkeys(row["op"] for row in rows):
        table.add_row(str(op), *(cells.get((op, pack), "") for pack in PACKS))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_hopper("kernels.attention_backward")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, tiles {backward_tiles(HEAD_SIZE)}")
    right = check_all()
    rows = [row for pack, lengths in PACKS.items() for row in pack_rows(pack, lengths)]
    show(rows)
    print(f"wrote {write_result('kernels', 'attention_backward', rows, arguments.out)}")
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
