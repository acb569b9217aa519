"""Writes a benchmark's result: `<folder>/<bench>_<name>.json`, with its figures and their provenance.

    bench commit source_digest date machine versions command rows     `rows`: flat objects, one a precision and workload

Further lists of flat objects may stand beside `rows` (the kernels of a profile). The commit is that of the checkout the
package runs from; where only its files were copied, what OCTETRL_COMMIT says; of an installed package, its version.
That is a claim. The digest (source_digest.py) is of the package's files themselves, so it shows a tree with other
changes: `python -m octetrl.telemetry.source_digest COMMIT` prints what a commit's must be. A result of a script in
`benchmarks/` has `benchmarks_digest` too, of all scripts there: `source_digest --benchmarks COMMIT`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from octetrl.telemetry.source_digest import BENCHMARKS, SCRIPTS, source_digest

ROOT = Path(__file__).parents[2]  # of the checkout, where there is one
Rows = Sequence[Mapping[str, object]]


def write_result(bench: str, name: str, rows: Rows, folder: Path, **further: Rows) -> Path:
    """Write the rows and return the file. `further`: more lists of rows, by their key in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}_{name}.json"
    record = {
        "bench": bench,
        "commit": _commit(),
        "source_digest": source_digest(),
        **_script_digest(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": _machine(),
        "versions": dict(_versions("torch", "triton", "transformers")),
        "command": _command(),
        "rows": list(rows),
        **{key: list(more) for key, more in further.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _command() -> str:
    """The command as typed, except `--out`, which is a path of that machine: `octetrl bench rollout ...`, or `python -m
    benchmarks.precisions --steps 20` from the checkout."""
    script = Path(sys.argv[0]).resolve()
    words = [script.name]
    if script.suffix == ".py" and script.is_relative_to(ROOT):
        words = ["python", "-m", ".".join(script.relative_to(ROOT).with_suffix("").parts)]
    arguments = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in arguments:
        place = arguments.index("--out")
        del arguments[place : place + 2]
    return shlex.join([*words, *arguments])


def _script_digest() -> dict[str, str]:
    if not Path(sys.argv[0]).resolve().is_relative_to(BENCHMARKS):
        return {}
    return {"benchmarks_digest": source_digest(BENCHMARKS, SCRIPTS)}


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions(*packages: str) -> list[tuple[str, str]]:
    found = []
    for package in packages:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:  # triton is for Linux alone
            continue
    return found


def _commit() -> str:
    if "OCTETRL_COMMIT" in os.environ:
        return os.environ["OCTETRL_COMMIT"]
    if (ROOT / ".git").exists() and shutil.which("git") is not None:
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        said = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
        if said:
            return said
    try:
        return version("octetrl")
    except PackageNotFoundError:
        return "unknown"
