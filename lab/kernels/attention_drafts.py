"""Draft rows of one sequence in decode, one layer: rows that read their keys alone, and rows that share a program.

    python -m lab.kernels.attention_drafts [--out FOLDER]

The shape and the caches are those of `lab.kernels.attention`: 32 query heads, 8 kv heads, head size 128, pages
of 128 keys. A workload is `sequences x keys + drafts`: each sequence has its own row and one for each draft. In every
tile the rows together are compared with the rows alone, bit by bit. Times are medians over replays of a CUDA graph, in
microseconds. Its calls take turns with caches that together are far larger than L2. A star marks the tile in use.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.kernels.attention import COLD_BYTES, HEAD_SIZE, HEADS, SCALE, Pages, Row, Timer
from lab.kernels.clock import median_us
from lab.record import RESULTS, need_hopper, write_result
from octetrl.kernels.attention.attention_decode import attention_decode_triton
from octetrl.kernels.attention.decode_layout import DecodeTile, DraftLayout

PRECISIONS = ("fp8_calibrated", "fp8_dynamic", "bf16")
SEQUENCES, KEYS, DRAFTS = 8, (1024, 4096), (4, 8)
TILES = {  # beside the tile in use
    "fp8_calibrated": (DecodeTile(16, 4), DecodeTile(32, 2), DecodeTile(32, 3)),
    "fp8_dynamic": (DecodeTile(16, 4), DecodeTile(32, 2), DecodeTile(32, 3)),
    "bf16": (DecodeTile(16, 3), DecodeTile(32, 2)),
}


@dataclass(frozen=True)
class Drafted:
    """The rows of a forward with drafts, and their pages."""

    pages: Pages  # a block table and a context for each row
    offset_N: Tensor

    @classmethod
    def random(cls, precision: str, keys: int, drafts: int, device: str) -> Drafted:
        pages = Pages.random(precision, [keys + drafts] * SEQUENCES, device)
        offset_N = torch.arange(1 + drafts, device=device).repeat(SEQUENCES)
        table_NP = pages.table.repeat_interleave(1 + drafts, dim=0)
        return cls(replace(pages, table=table_NP, contexts=(keys + offset_N).int()), offset_N)

    def layout(self, q_NHD: Tensor, tile: DecodeTile | None) -> DraftLayout | None:
        return DraftLayout.chosen(q_NHD, self.pages.k, self.pages.v, self.pages.table.shape[1], tile)

    def decode(self, q_NHD: Tensor, tile: DecodeTile | None = None, *, together: bool = True) -> Tensor:
        pages = self.pages
        out = attention_decode_triton(
            q_NHD, pages.k, pages.v, pages.table, pages.contexts, SCALE, pages.k_scale, pages.v_scale,
            tile=tile, draft_offset_B=self.offset_N if together else None,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out


def workload_rows(precision: str, keys: int, drafts: int, device: str, timer: Timer) -> Iterator[Row]:
    """One row for rows alone, one for the tile in use, one for each other tile."""
    caches = [Drafted.random(precision, keys, drafts, device)]
    read = caches[0].pages.bytes_read // (1 + drafts)
    caches += [Drafted.random(precision, keys, drafts, device) for _ in range(-(-COLD_BYTES // read) - 1)]
    turns = itertools.cycle(caches)
    q = torch.randn(SEQUENCES * (1 + drafts), HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=device)
    want = caches[0].decode(q, together=False)
    what = {"precision": precision, "workload": f"{SEQUENCES}x{keys}+{drafts}"}
    alone = timer(partial(decode_next, turns, q, None, together=False))
    yield what | {"rows": 1, "tile": "alone", "us": alone}
    for tile in (None, *TILES[precision]):
        layout = caches[0].layout(q, tile)
        assert layout is not None, "every workload here shares keys"
        differing = int((caches[0].decode(q, tile) != want).flatten(1).any(1).sum())
        name = f"{'*' if tile is None else ''}{layout.tile.columns} columns, {layout.tile.stages} stages"
        us = timer(partial(decode_next, turns, q, tile))
        times = {"us": us, "times_alone": alone / us}
        yield what | {"rows": layout.rows, "tile": name, **times, "differing_rows": differing}


def decode_next(turns: Iterator[Drafted], q_NHD: Tensor, tile: DecodeTile | None, *, together: bool = True) -> None:
    next(turns).decode(q_NHD, tile, together=together)


def show(rows: list[Row]) -> None:
    """One line for each workload: microseconds, and times as fast as rows alone."""
    table = Table("precision", "workload", "alone", "together", "other tiles", title="draft rows of one layer, µs")
    for (precision, workload), group in itertools.groupby(rows, lambda row: (row["precision"], row["workload"])):
        alone, used, *others = (row for row in group)
        cells = [f"{row['us']:.1f} ({row['times_alone']:.2f}) {row['tile']}" for row in (used, *others)]
        table.add_row(str(precision), str(workload), f"{alone['us']:.1f}", cells[0], "\n".join(cells[1:]))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_hopper("kernels.attention_drafts")
    torch.manual_seed(0)
    workloads = itertools.product(PRECISIONS, KEYS, DRAFTS)
    rows = [row for workload in workloads for row in workload_rows(*workload, "cuda", median_us)]
    show(rows)
    wrong = [f"{row['precision']} {row['workload']} {row['tile']}" for row in rows if row.get("differing_rows")]
    print(f"rows that differ from rows alone: {'; '.join(wrong) or 'none'}")
    print(f"wrote {write_result('kernels', 'attention_drafts', rows, arguments.out)}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
