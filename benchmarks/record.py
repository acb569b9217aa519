"""What the benchmarks share: where their figures go, `benchmarks/results/<bench>_<name>.json`
(octetrl/telemetry/bench_record.py), and what they say where the device is missing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from octetrl.telemetry import bench_record

RESULTS = Path(__file__).parent / "results"


def need_hopper(bench: str, or_else: str = "") -> None:
    """Ends the program with one line unless a Hopper GPU, or a later one, is here. `or_else`: what runs without."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        print(f"benchmarks.{bench}: no Hopper GPU here; run it on one{or_else}", file=sys.stderr)
        raise SystemExit(2)


def write_result(bench: str, name: str, rows: Sequence[Mapping[str, object]], folder: Path = RESULTS) -> Path:
    """Write the rows (flat, one a precision and workload) and return the file."""
    return bench_record.write_result(bench, name, rows, folder)
