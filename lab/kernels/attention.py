"""Times attention alone, one layer, in every format of the KV cache: decode, prefill, packed forward and backward.

32 query heads, 8 kv heads, head size 128, pages of 128 keys, random values. Decode is counted in bytes of K and V (and
their scales) a second, and as a share of the 4.3 TB/s that an H200's memory gives; all else in floating-point
operations under the causal mask, a backward as 2.5 forwards. The packed forward includes the replay of the cache.
Beside it in BF16 is torch's `scaled_dot_product_attention`, by cuDNN and by FlashAttention, of the same sequences as a
batch, without a log-sum-exp; a back-end that refuses them says so, and one that runs has its distance from ours. Calls
of decode take turns with caches that together are far larger than L2.

A workload is `sequences x context`, for prefill `sequences x context-before + chunk`; ragged contexts are spread evenly
from one length to another, in random, rising or falling order.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lab.kernels.clock import Row, median_us
from octetrl.bench.rows import MEMORY_BYTES_PER_SECOND
from octetrl.fp8.format import E4M3, is_code
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention.attention_decode import attention_decode_triton
from octetrl.kernels.attention.attention_packed import attention_packed_forward
from octetrl.kernels.attention.attention_packed_backward import attention_packed_backward_triton
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.decode_layout import DecodeTile
from octetrl.kernels.attention.kv_store import kv_replay, v_pages_shape
from octetrl.kernels.attention.records import CachedPages, Replay
from octetrl.shapes.blocks import KVMode, KVTensors

DEVICE = "cuda"
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


@dataclass(frozen=True)
class Pages:
    """A cache for sequences with these contexts, their pages in random order."""

    k: CachedPages
    v: CachedPages
    table: Tensor
    contexts: Tensor

    @classmethod
    def random(cls, precision: str, contexts: list[int]) -> Pages:
        kv_mode, quantized = CACHES[precision]
        counts = [-(-context // PAGE_SIZE) for context in contexts]
        rows = (sum(counts), KV_HEADS, PAGE_SIZE)
        codes = {"none": torch.bfloat16, "int8": torch.int8}.get(kv_mode, E4M3)
        k_dtype, v_dtype = (codes if quantized != other else torch.bfloat16 for other in "vk")
        table = torch.full((len(contexts), max(counts)), -1, dtype=torch.int32)
        for row, pages in zip(table, torch.randperm(sum(counts)).int().split(counts), strict=True):
            row[: len(pages)] = pages

        def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).to(dtype)

        def cached(shape: tuple[int, ...], dtype: torch.dtype) -> CachedPages:
            if not is_code(dtype):
                return CachedPages(values(shape, dtype))
            if kv_mode == "calibrated":
                return CachedPages(values(shape, dtype), torch.ones(KV_HEADS, device=DEVICE))
            return CachedPages(values(shape, dtype), token_scale=torch.ones(rows, device=DEVICE))

        return cls(
            k=cached((*rows, HEAD_SIZE), k_dtype),
            v=cached(v_pages_shape(*rows, HEAD_SIZE, v_dtype), v_dtype),
            table=table.to(DEVICE),
            contexts=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        )

    @property
    def bytes_read(self) -> int:
        row_bytes = sum(x.pages.element_size() * HEAD_SIZE + 4 * (x.token_scale is not None) for x in (self.k, self.v))
        return int(self.contexts.sum()) * KV_HEADS * row_bytes

    def decode(self, q_BHD: Tensor, tile: DecodeTile | None, quantize: bool = False) -> Tensor | Quantized:
        tables = (self.k, self.v, self.table, self.contexts)
        return attention_decode_triton(q_BHD, *tables, SCALE, quantize, tile=tile)


def measure(arguments: argparse.Namespace) -> list[Row]:
    return [row for precision in CACHES for side in (_decode, _prefill, _trainer) for row in side(precision)]


def causal_flops(sequences: int, before: int, queries: int) -> int:
    """Of both GEMMs of a forward: query i of a chunk meets before + i + 1 keys."""
    return 4 * HEADS * HEAD_SIZE * sequences * (queries * before + queries * (queries + 1) // 2)


def _decode(precision: str) -> Iterator[Row]:
    for workload, contexts in DECODE.items():
        caches = [Pages.random(precision, contexts)]
        bytes_read = caches[0].bytes_read
        caches += [Pages.random(precision, contexts) for _ in range(-(-COLD_BYTES // bytes_read) - 1)]
        turns = itertools.cycle(caches)
        q = torch.randn(len(contexts), HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE)
        calls = {
            "decode": partial(decode_next, turns, q, None),
            "decode, quantised": partial(decode_next, turns, q, None, quantize=True),
        }
        for tile in TILES.get(precision, []):
            calls[f"decode {tile.columns} columns {tile.stages} stages"] = partial(decode_next, turns, q, tile)
        for op, call in calls.items():
            us = median_us(call)
            tb_per_s = bytes_read / us / 1e6
            figures = {"us": us, "tb_per_s": tb_per_s, "share": tb_per_s * 1e12 / MEMORY_BYTES_PER_SECOND}
            yield {"precision": precision, "op": op, "workload": workload, **figures}


def decode_next(turns: Iterator[Pages], q_BHD: Tensor, tile: DecodeTile | None, quantize: bool = False) -> None:
    next(turns).decode(q_BHD, tile, quantize)


def _prefill(precision: str) -> Iterator[Row]:
    for sequences, before, chunk in PREFILL:
        pages = Pages.random(precision, [before + chunk] * sequences)
        tokens = sequences * chunk
        q = torch.randn(tokens, HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE)
        cu_seqlens = torch.arange(0, tokens + 1, chunk, dtype=torch.int32, device=DEVICE)
        tables = (q, pages.k, pages.v, pages.table, cu_seqlens, pages.contexts, SCALE)
        us = median_us(partial(attention_paged, *tables, chunk))
        tflops = causal_flops(sequences, before, chunk) / us / 1e6
        workload = f"{sequences}x{before}+{chunk}"
        yield {"precision": precision, "op": "prefill", "workload": workload, "us": us, "tflop_per_s": tflops}


def _trainer(precision: str) -> Iterator[Row]:
    kv_mode, quantized = CACHES[precision]
    for sequences, length in PACKED:
        tokens = sequences * length
        heads = (HEADS, KV_HEADS, KV_HEADS)
        fused = torch.randn(tokens, sum(heads), HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE)
        q, k, v = fused.split(heads, dim=1)
        k_scale, v_scale = (x.float().abs().amax((0, 2)) / 448 for x in (k, v))
        cu_seqlens = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)
        replay = Replay(kv_mode, k_scale, v_scale, quantized)
        out, lse2 = attention_packed_forward(q, k, v, cu_seqlens, length, SCALE, replay)
        kv = kv_replay(k, v, replay)
        calls: dict[str, Callable[[], Any]] = {
            "packed forward": partial(attention_packed_forward, q, k, v, cu_seqlens, length, SCALE, replay),
            "packed backward": partial(
                attention_packed_backward_triton, out, q, kv, out, lse2, cu_seqlens, length, SCALE
            ),
        }
        for (op, call), share in zip(calls.items(), (1.0, 2.5), strict=True):
            us = median_us(call)
            tflops = share * causal_flops(sequences, 0, length) / us / 1e6
            workload = f"{sequences}x{length}"
            yield {"precision": precision, "op": op, "workload": workload, "us": us, "tflop_per_s": tflops}
        if kv_mode == "none":
            yield from _library((q, k, v), out, sequences)


def library_forward(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, sequences: int) -> Tensor:
    """Of packed [T, H, D] sequences of one length, as [sequences, H, length, D]. RuntimeError where it refuses them."""
    q, k, v = (x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)


def _library(qkv: tuple[Tensor, Tensor, Tensor], ours: Tensor, sequences: int) -> Iterator[Row]:
    length = ours.shape[0] // sequences
    for name, backend in LIBRARY.items():
        row: Row = {"precision": "bf16", "op": f"{name} forward", "workload": f"{sequences}x{length}"}
        try:
            out = library_forward(backend, *qkv, sequences)
        except RuntimeError as error:
            yield row | {"refused": " ".join(str(error).split())[:100]}
            continue
        distance = (out.transpose(1, 2).flatten(0, 1).float() - ours.float()).norm() / ours.float().norm()
        us = median_us(partial(library_forward, backend, *qkv, sequences))
        tflops = causal_flops(sequences, 0, length) / us / 1e6
        yield row | {"us": us, "tflop_per_s": tflops, "relative_error": float(distance)}
