"""Attention alone, one layer, in every format of the KV cache: decode, prefill, and the packed forward and backward.

    python -m lab.kernels.attention [--only decode|forwards] [--out FOLDER]

First decode is checked against the packed forward, bit for bit, and its quantised output against the quantiser, byte
for byte. Then the times: 32 query heads, 8 kv heads, head size 128, pages of 128 keys, random values. Decode is counted
in bytes of K and V (and their scales) a second, and as a share of the 4.3 TB/s that an H200's memory gives; all else in
floating-point operations under the causal mask, a backward as 2.5 forwards. The packed forward includes the replay of
the cache. Beside it in BF16 is torch's `scaled_dot_product_attention`, by cuDNN and by FlashAttention, of the same
sequences as a batch, without a log-sum-exp; a back-end that refuses them says so, and one that runs has its distance
from ours. Times are medians over replays of a CUDA graph. Calls of decode take turns with caches that together are far
larger than L2.

A workload is `sequences x context`, for prefill `sequences x context-before + chunk`; ragged contexts are spread evenly
from one length to another, in random, rising or falling order. `--only decode` leaves the rest out, and writes nothing.
`--only forwards` times prefill and the packed forward in Gluon and in Triton, without the replay, and writes a file of
its own.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.kernels.clock import median_us
from lab.record import RESULTS, need_hopper, write_result
from octetrl.bench.hardware import MEMORY_BYTES_PER_SECOND
from octetrl.fp8.format import E4M3, is_code
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_decode import attention_decode_triton
from octetrl.kernels.attention.attention_packed import attention_packed, attention_packed_forward
from octetrl.kernels.attention.attention_packed_backward import attention_packed_backward_triton
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.attention_rows import attention_rows
from octetrl.kernels.attention.decode_layout import DecodeTile
from octetrl.kernels.attention.kv_store import by_key, kv_replay, kv_store, v_pages_shape
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.shapes.blocks import KVMode, KVTensors

HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE = 32, 8, 128, 128
SCALE = HEAD_SIZE**-0.5
CACHES: dict[str, tuple[KVMode, KVTensors]] = {  # kv_mode, and what is quantised
    "bf16": ("none", "both"),
    "fp8_calibrated": ("calibrated", "both"),
    "fp8_dynamic": ("dynamic", "both"),
    "int8": ("int8", "both"),
    "fp8_v_calibrated": ("calibrated", "v"),
    "fp8_v_dynamic": ("dynamic", "v"),
}
DECODE: dict[str, list[int]] = {  # contexts
    "128x2560": [2560] * 128,
    "128x512..4608": torch.linspace(512, 4608, 128)[torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    .int()
    .tolist(),
    "256x1024": [1024] * 256,
    "64x16384": [16384] * 64,
    "16x8192": [8192] * 16,
    "16x16384": [16384] * 16,
    "4x16384": [16384] * 4,
    "1x16384": [16384],
    "8x4000": [4000] * 8,
    "32x1500": [1500] * 32,
    "48x300..16000": [16000, 9000, *torch.linspace(300, 6000, 46).int().tolist()],
}
COLD_BYTES = 1 << 28  # read between two visits of a key: several times an H200's L2
DECODE |= {
    "128x512..4608 rising": sorted(DECODE["128x512..4608"]),
    "128x512..4608 falling": sorted(DECODE["128x512..4608"], reverse=True),
}
TILES: dict[str, list[DecodeTile]] = {  # compared with one another; codes take 16 columns
    "bf16": [DecodeTile(columns, stages) for columns in (8, 16) for stages in (2, 3)],
    "fp8_calibrated": [DecodeTile(16, stages) for stages in (2, 3, 4)],
    "fp8_v_calibrated": [DecodeTile(16, stages) for stages in (2, 3)],
}
PREFILL = [(4, 0, 4096), (16, 2048, 512)]  # sequences, context before, chunk
PACKED = [(16, 1024), (4, 4096), (1, 16384)]  # sequences, length
LIBRARY = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}

Row = dict[str, object]
Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Pages:
    """A cache for sequences with these contexts, their pages in random order."""

    k: Tensor
    v: Tensor
    table: Tensor
    contexts: Tensor
    k_scale: Tensor | None  # by head or by token, as the cache's mode has it
    v_scale: Tensor | None

    @classmethod
    def zeros(
        cls, precision: str, contexts: list[int], scale_2K: Tensor, head_size: int = HEAD_SIZE, device: str = "cuda"
    ) -> Pages:
        kv_mode, quantized = CACHES[precision]
        counts = [-(-context // PAGE_SIZE) for context in contexts]
        rows = (sum(counts), scale_2K.shape[1], PAGE_SIZE)
        codes = {"none": torch.bfloat16, "int8": torch.int8}.get(kv_mode, E4M3)
        k_dtype, v_dtype = (codes if quantized != other else torch.bfloat16 for other in "vk")
        table = torch.full((len(contexts), max(counts)), -1, dtype=torch.int32)
        for row, pages in zip(table, torch.randperm(sum(counts)).int().split(counts), strict=True):
            row[: len(pages)] = pages

        def scale_of(dtype: torch.dtype, scale_K: Tensor) -> Tensor | None:
            if not is_code(dtype):
                return None
            return scale_K if kv_mode == "calibrated" else torch.ones(rows, device=device)

        return cls(
            k=torch.zeros(*rows, head_size, dtype=torch.bfloat16, device=device).to(k_dtype),
            v=torch.zeros(v_pages_shape(*rows, head_size, v_dtype), dtype=torch.bfloat16, device=device).to(v_dtype),
            table=table.to(device),
            contexts=torch.tensor(contexts, dtype=torch.int32, device=device),
            k_scale=scale_of(k_dtype, scale_2K[0]),
            v_scale=scale_of(v_dtype, scale_2K[1]),
        )

    @classmethod
    def random(cls, precision: str, contexts: list[int], device: str) -> Pages:
        pages = cls.zeros(precision, contexts, torch.ones(2, KV_HEADS, device=device), device=device)
        for cache in (pages.k, pages.v):
            cache.copy_(torch.randn(cache.shape, dtype=torch.bfloat16, device=device).to(cache.dtype))
        return pages

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """As `kv_store` and `attention_paged` take them."""
        by_head = [None if scale is None or scale.dim() == 3 else scale for scale in (self.k_scale, self.v_scale)]
        by_token = [None if scale is None or scale.dim() == 1 else scale for scale in (self.k_scale, self.v_scale)]
        names = ("k_scale_K", "v_scale_K", "k_token_scale", "v_token_scale")
        return dict(zip(names, by_head + by_token, strict=True))

    @property
    def bytes_read(self) -> int:
        row_bytes = (self.k.element_size() + self.v.element_size()) * HEAD_SIZE
        row_bytes += 4 * sum(scale is not None and scale.dim() == 3 for scale in (self.k_scale, self.v_scale))
        return int(self.contexts.sum()) * KV_HEADS * row_bytes

    def decode(self, q_BHD: Tensor, tile: DecodeTile | None, quantize: bool = False) -> Tensor | Quantized:
        tables = (self.k, self.v, self.table, self.contexts)
        return attention_decode_triton(q_BHD, *tables, SCALE, self.k_scale, self.v_scale, quantize, tile=tile)


# ---------------------------------------------------------------- bits


def differing_rows(
    precision: str, head_size: int, tile: DecodeTile | None, device: str, longest: int, count: int = 512
) -> tuple[int, int]:
    """Rows in which decode differs from the packed forward, and in which its codes differ from the quantiser's."""
    kv_mode, quantized = CACHES[precision]
    lengths = [1, 127, 128, 129, longest // 4 - 24, longest]
    tokens, heads = sum(lengths), (8, 2, 2)
    fused = torch.randn(tokens, sum(heads), head_size, dtype=torch.bfloat16, device=device)
    q, k, v = fused.split(heads, dim=1)
    scale_2K = torch.stack([x.float().abs().amax((0, 2)) * 0.9 / 448 for x in (k, v)])
    ends = torch.tensor([0, *lengths]).cumsum(0)
    replay = (scale_2K[0], scale_2K[1], kv_mode, quantized)
    want = attention_packed(q, k, v, ends.int().to(device), longest, SCALE, *replay)

    pages = Pages.zeros(precision, lengths, scale_2K, head_size, device)
    sequence_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)
    position_T = torch.arange(tokens, device=device) - ends.to(device)[sequence_T]
    slots = pages.table[sequence_T, position_T // PAGE_SIZE].long() * PAGE_SIZE + position_T % PAGE_SIZE
    kv_store(k, v, pages.k, pages.v, slots, **pages.scales)

    row_B = torch.randint(0, tokens, (count,), device=device)
    each = replace(pages, table=pages.table[sequence_T[row_B]], contexts=(position_T[row_B] + 1).int())
    out = each.decode(q[row_B], tile)
    assert isinstance(out, Tensor)
    differing = int((out != want[row_B]).flatten(1).any(1).sum())
    few = replace(each, table=each.table[:40], contexts=each.contexts[:40])  # few enough to split their keys
    out_of_few = few.decode(q[row_B[:40]], tile)
    assert isinstance(out_of_few, Tensor)
    differing += int((out_of_few != want[row_B[:40]]).flatten(1).any(1).sum())
    if head_size != HEAD_SIZE:
        return differing, 0
    got, expected = each.decode(q[row_B], tile, quantize=True), quantize_activation(out.flatten(1))
    assert isinstance(got, Quantized)
    wrong = (got.codes.view(torch.uint8) != expected.codes.view(torch.uint8)).any(1)
    return differing, int((wrong | (got.scale != expected.scale).any(1)).sum())


def check_bits(device: str, longest: int = 4096) -> bool:
    """Prints one line a precision, head size and tile; whether all are right."""
    right = True
    for precision in CACHES:
        for head_size in (64, 128):
            for tile in TILES.get(precision, [None]):
                rows, codes = differing_rows(precision, head_size, tile, device, longest)
                right &= rows == codes == 0
                print(
                    f"{'FAIL' if rows or codes else 'OK'} decode {precision} head {head_size} {tile or ''}: of 512 rows"
                    f" {rows} differ from the packed forward, {codes} from the quantiser"
                )
    return right


# ---------------------------------------------------------------- times


def causal_flops(sequences: int, before: int, queries: int) -> int:
    """Of both GEMMs of a forward: query i of a chunk meets before + i + 1 keys."""
    return 4 * HEADS * HEAD_SIZE * sequences * (queries * before + queries * (queries + 1) // 2)


def decode_rows(precision: str, device: str, timer: Timer) -> Iterator[Row]:
    for workload, contexts in DECODE.items():
        caches = [Pages.random(precision, contexts, device)]
        bytes_read = caches[0].bytes_read
        caches += [Pages.random(precision, contexts, device) for _ in range(-(-COLD_BYTES // bytes_read) - 1)]
        turns = itertools.cycle(caches)
        q = torch.randn(len(contexts), HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
        calls = {
            "decode": partial(decode_next, turns, q, None),
            "decode, quantised": partial(decode_next, turns, q, None, quantize=True),
        }
        for tile in TILES.get(precision, []):
            calls[f"decode {tile.columns} columns {tile.stages} stages"] = partial(decode_next, turns, q, tile)
        for op, call in calls.items():
            us = timer(call)
            tb_per_s = bytes_read / us / 1e6
            figures = {"us": us, "tb_per_s": tb_per_s, "share": tb_per_s * 1e12 / MEMORY_BYTES_PER_SECOND}
            yield {"precision": precision, "op": op, "workload": workload, **figures}


def decode_next(turns: Iterator[Pages], q_BHD: Tensor, tile: DecodeTile | None, quantize: bool = False) -> None:
    next(turns).decode(q_BHD, tile, quantize)


def prefill_rows(precision: str, device: str, timer: Timer) -> Iterator[Row]:
    for sequences, before, chunk in PREFILL:
        pages = Pages.random(precision, [before + chunk] * sequences, device)
        tokens = sequences * chunk
        q = torch.randn(tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
        cu_seqlens = torch.arange(0, tokens + 1, chunk, dtype=torch.int32, device=device)
        tables = (q, pages.k, pages.v, pages.table, cu_seqlens, pages.contexts, SCALE)
        scales = pages.scales
        us = timer(
            partial(
                attention_paged, *tables, scales["k_scale_K"], scales["v_scale_K"], scales["k_token_scale"],
                scales["v_token_scale"], chunk,
            )
        )  # fmt: skip
        tflops = causal_flops(sequences, before, chunk) / us / 1e6
        workload = f"{sequences}x{before}+{chunk}"
        yield {"precision": precision, "op": "prefill", "workload": workload, "us": us, "tflop_per_s": tflops}


def forward_rows(precision: str, device: str, timer: Timer) -> Iterator[Row]:
    """Both forwards of `attention_rows`, in Gluon and in Triton."""
    kv_mode, quantized = CACHES[precision]
    calls: dict[tuple[str, str], tuple[int, tuple[Any, ...]]] = {}
    for lengths in ([1024] * 16, [4096] * 4, [16384], [5451, 300, 2100, 1006, 40, 700, 3000, 3787]):
        fused = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
        q, k, v = fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        k_scale, v_scale = (x.float().abs().amax((0, 2)) / 448 for x in (k, v))
        kv = kv_replay(k, v, kv_mode, k_scale, v_scale, quantized)
        ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        name = f"{len(lengths)}x{lengths[0]}" if len(set(lengths)) == 1 else "8 of 40 to 5451"
        flops = sum(causal_flops(1, 0, length) for length in lengths)
        packed = (q, kv.k_TKD, kv.v_TKD, ends, max(lengths), SCALE, kv.k_scale, kv.v_scale)
        calls["packed forward", name] = flops, packed
    for sequences, before, chunk in PREFILL:
        pages = Pages.random(precision, [before + chunk] * sequences, device)
        q = torch.randn(sequences * chunk, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
        ends = torch.arange(0, sequences * chunk + 1, chunk, dtype=torch.int32, device=device)
        tables = (pages.k_scale, pages.v_scale, pages.table, pages.contexts)
        paged = (q, pages.k, by_key(pages.v), ends, chunk, SCALE, *tables)
        calls["prefill", f"{sequences}x{before}+{chunk}"] = causal_flops(sequences, before, chunk), paged
    for (op, workload), (flops, operands) in calls.items():
        for language, gluon in (("Gluon", True), ("Triton", False)):
            us = timer(partial(partial(attention_rows, gluon=gluon), *operands))
            row: Row = {"precision": precision, "op": f"{op}, {language}", "workload": workload, "us": us}
            yield row | {"tflop_per_s": flops / us / 1e6}


def trainer_rows(precision: str, device: str, timer: Timer) -> Iterator[Row]:
    kv_mode, quantized = CACHES[precision]
    for sequences, length in PACKED:
        tokens = sequences * length
        heads = (HEADS, KV_HEADS, KV_HEADS)
        fused = torch.randn(tokens, sum(heads), HEAD_SIZE, dtype=torch.bfloat16, device=device)
        q, k, v = fused.split(heads, dim=1)
        k_scale, v_scale = (x.float().abs().amax((0, 2)) / 448 for x in (k, v))
        cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        replay = (k_scale, v_scale, kv_mode, quantized)
        out, lse2 = attention_packed_forward(q, k, v, cu_seqlens, length, SCALE, *replay)
        kv = kv_replay(k, v, kv_mode, k_scale, v_scale, quantized)
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
        if kv_mode == "none":
            yield from library_rows((q, k, v), out, sequences, timer)


def library_forward(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
    """Of packed [T, H, D] sequences of one length, as [sequences, H, length, D]. RuntimeError where it refuses them."""
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)


def library_rows(qkv: tuple[Tensor, Tensor, Tensor], ours: Tensor, sequences: int, timer: Timer) -> Iterator[Row]:
    length = ours.shape[0] // sequences
    for name, backend in LIBRARY.items():
        row: Row = {"precision": "bf16", "op": f"{name} forward", "workload": f"{sequences}x{length}"}
        try:
            out = library_forward(backend, *qkv, sequences)
        except RuntimeError as error:
            yield row | {"refused": " ".join(str(error).split())[:100]}
            continue
        distance = (out.transpose(1, 2).flatten(0, 1).float() - ours.float()).norm() / ours.float().norm()
        us = timer(partial(library_forward, backend, *qkv, sequences))
        tflops = causal_flops(sequences, 0, length) / us / 1e6
        yield row | {"us": us, "tflop_per_s": tflops, "relative_error": float(distance)}


SIDES = {"decode": decode_rows, "forwards": forward_rows}


def show(rows: list[Row]) -> None:
    columns = ("precision", "op", "workload", "us", "tb_per_s", "share", "tflop_per_s", "relative_error", "refused")
    table = Table(*columns, title="attention, one layer")
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SIDES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_hopper("kernels.attention")
    torch.manual_seed(0)
    right = arguments.only == "forwards" or check_bits("cuda")  # tests/gpu compares the bits of Gluon and Triton
    sides = (SIDES[arguments.only],) if arguments.only else (decode_rows, prefill_rows, trainer_rows)
    rows = [row for precision in CACHES for side in sides for row in side(precision, "cuda", median_us)]
    show(rows)
    if arguments.only != "decode":
        name = "_".join(filter(None, ("attention", arguments.only)))
        print(f"wrote {write_result('kernels', name, rows, arguments.out)}")
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
