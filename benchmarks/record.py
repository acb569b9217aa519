"""Where a benchmark's figures go: `benchmarks/results/<bench>_<name>.json` (octetrl/telemetry/bench_record.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from octetrl.telemetry import bench_record

RESULTS = Path(__file__).parent / "results"


def write_result(bench: str, name: str, rows: Sequence[Mapping[str, object]], folder: Path = RESULTS) -> Path:
    """Write the rows (flat, one a precision and workload) and return the file."""
    return bench_record.write_result(bench, name, rows, folder)
