"""Where a benchmark's figures go: `benchmarks/results/<bench>_<name>.json`, with what is needed to judge them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def write_result(bench: str, name: str, rows: Sequence[Mapping[str, object]], folder: Path = RESULTS) -> Path:
    """Write the rows (flat, one a precision and workload) and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}_{name}.json"
    record = {
        "bench": bench,
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": _machine(),
        "versions": {package: version(package) for package in ("torch", "triton", "transformers")},
        "command": _command(),
        "rows": list(rows),
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _command() -> str:
    """As typed from the repository's root: `python -m benchmarks.precisions --steps 20`."""
    script = Path(sys.argv[0]).resolve()
    root = RESULTS.parents[1]
    module = ".".join(script.relative_to(root).with_suffix("").parts) if script.is_relative_to(root) else script.name
    return " ".join(["python", "-m", module, *sys.argv[1:]])


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _commit() -> str:
    """Of the checkout, or what OCTETRL_COMMIT says where only the files were copied."""
    if "OCTETRL_COMMIT" in os.environ:
        return os.environ["OCTETRL_COMMIT"]
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
