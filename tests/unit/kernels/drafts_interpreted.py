"""Runs draft rows that share a program in Triton's interpreter, beside the same rows alone, and says what differs.

attention_interpreted.py runs it in its process. A product is computed column by column here. On a tensor core, too, no
bit of a column depends on the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.attention import attention_paged
from octetrl.kernels.attention.attention_decode import attention_decode_triton
from octetrl.kernels.attention.decode_layout import DecodeTile, DraftLayout
from octetrl.shapes.blocks import KVTensors
from tests.unit.kernels.attention_cases import DraftedRows, PagedCache, random_qkv

SCALE = 0.2
KV_HEADS = 2


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def multiply_by_columns() -> None:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = (
            (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data
            for x in (a, b)
        )
        left = np.ascontiguousarray(left, dtype=np.float32)
        columns = [left @ np.ascontiguousarray(column, dtype=np.float32) for column in right.T]
        return interpreter.TensorHandle(np.stack(columns, axis=1) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def compare(
    kv_mode: str, quantized: KVTensors, head_size: int, page_size: int, group: int, drafted: list[tuple[int, int]],
    columns: int | None = None, window: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """drafted: keys of each sequence's own row, and its rows. columns: of the tile, instead of the chosen one."""
    rows = DraftedRows.of(drafted)
    q, k, v = random_qkv(rows.lengths, KV_HEADS, group, head_size, torch.bfloat16)
    cache = PagedCache.filled(rows.lengths, k, v, kv_mode, quantized, page_size)
    table = cache.block_table[rows.sequence_N]
    q_N = q[torch.arange(len(rows.context_N)) * 7 % len(q)]  # a query of its own for each row
    tables = (q_N, cache.k, cache.v, table, rows.context_N, SCALE)
    tile = None if columns is None else DecodeTile(columns, 1)
    layout = DraftLayout.chosen(q_N, cache.k.pages, cache.v.pages, table.shape[1], tile)
    found: dict[str, float] = {"rows of a program": 1 if layout is None else layout.rows}
    together: Any = {"tile": tile, "window": window, "draft_offset_B": rows.offset_N}
    for quantize in (False, True) if head_size == 128 else (False,):
        alone = attention_decode_triton(*tables, quantize=quantize, window=window)
        shared = attention_decode_triton(*tables, quantize=quantize, **together)
        for ours, theirs in zip(parts(shared), parts(alone), strict=True):
            found["other bytes"] = found.get("other bytes", 0) + int((bytes_of(ours) != bytes_of(theirs)).sum())
        if not quantize:
            each = torch.arange(len(q_N) + 1, dtype=torch.int32)
            paged = (q_N, cache.k, cache.v, table, each, rows.context_N, SCALE)
            want = attention_paged.attention_paged_reference(*paged, window=window)
            found["error"] = distance(parts(shared)[0], want)
    return found


def parts(out: Tensor | Quantized) -> tuple[Tensor, ...]:
    return (out.codes, out.scale) if isinstance(out, Quantized) else (out,)


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


FEW = [(130, 3), (5, 1), (0, 1), (124, 6), (1, 2), (0, 1)]  # the last draft enters a chunk; inactive rows between
SOME = [(126, 4), (0, 1), (5, 2)]  # the same, shorter: the interpreter takes its time over each row
RAGGED = [(number * 12, number) for number in (1, 2, 9, 16)]  # programs that are full, and ones that are not
FOURS = [(number * 20, number) for number in (3, 4, 9)]  # the same with four rows a program
CASES: dict[str, tuple[Any, ...]] = {
    "none": ("none", "both", 64, 128, 2, FEW),
    "calibrated": ("calibrated", "both", 128, 128, 4, FEW),
    "dynamic": ("dynamic", "both", 64, 128, 8, FEW),
    "int8": ("int8", "both", 64, 32, 3, FEW),
    "calibrated-v": ("calibrated", "v", 64, 128, 4, SOME, 16),
    "dynamic-v": ("dynamic", "v", 64, 32, 4, SOME, 32),
    "int8-v": ("int8", "v", 64, 128, 4, SOME, 16),
    "calibrated-k": ("calibrated", "k", 64, 128, 4, SOME, 16),
    "dynamic-k": ("dynamic", "k", 64, 32, 4, SOME, 16),
    "int8-k": ("int8", "k", 64, 128, 4, SOME, 16),
    "head-80-window-100": ("calibrated", "both", 80, 16, 5, SOME, None, 100),
    "head-192": ("dynamic", "both", 192, 128, 4, SOME, 16),
    "head-256-window-2": ("none", "both", 256, 16, 2, SOME, 16, 2),
    "group-20": ("none", "both", 64, 128, 20, SOME, 64),
    "group-1-of-1-to-16-rows": ("calibrated", "both", 64, 128, 1, RAGGED),
    "group-7-of-1-to-9-rows-window-130": ("none", "both", 64, 64, 7, FOURS, None, 130),
}


def compare_all() -> dict[str, dict[str, float]]:
    """By case, in the process of attention_interpreted.py. Products are computed by columns from now on."""
    multiply_by_columns()
    return {name: compare(*case) for name, case in CASES.items()}
