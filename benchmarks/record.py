"""What all scripts share: the folder of the results, how a result is written, and the check for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from octetrl.telemetry import bench_record

Row = Mapping[str, object]
RESULTS = Path(__file__).parent / "results"


def need_hopper(bench: str, or_else: str = "") -> None:
    """End the program with one line unless there is a Hopper GPU or a later one. `or_else`: what works without."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        print(f"benchmarks.{bench}: no Hopper GPU here; run it on one{or_else}", file=sys.stderr)
        raise SystemExit(2)


def write_result(bench: str, name: str, rows: Sequence[Row], folder: Path = RESULTS, **further: Sequence[Row]) -> Path:
    """Write the rows (flat, one a precision and workload) and return the file. `further`: more lists of rows."""
    return bench_record.write_result(bench, name, rows, folder, **further)
