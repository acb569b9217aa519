"""Write a benchmark's result: `<folder>/<bench>_<name>.json`, with its figures and where they come from.

    bench commit source_digest date machine versions command rows

`rows` is a list of flat objects, one per precision and workload. A file may have further such lists, such as the
kernels of a profile. `commit` is OCTETRL_COMMIT if it is set (for a copy of the files without git). Otherwise it is the
checkout's commit, or the version of an installed package.

A commit's name may be wrong for a tree with other changes. `source_digest` shows that, because it is computed from the
package's files (source_digest.py). `python -m octetrl.telemetry.source_digest COMMIT` prints the digest that a commit
must have. A result of a script in `lab/` also has `benchmarks_digest`, computed from all scripts there:
`source_digest --lab COMMIT`.
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
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from octetrl.system.text import counted
from octetrl.telemetry.source_digest import LAB, SCRIPTS, source_digest

ROOT = Path(__file__).parents[2]  # root of the checkout, if there is one
Rows = Sequence[Mapping[str, object]]


def write_result(bench: str, name: str, rows: Rows, folder: Path, **further: Rows) -> Path:
    """Write the rows to a file and return its path. further: more lists of rows, by their key in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}_{name}.json"
    record = {
        "bench": bench,
        **provenance(),
        "command": _command(),
        "rows": list(rows),
        **{key: list(more) for key, more in further.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def provenance() -> dict[str, object]:
    """Where and by which files this process measures: the fields of a result from `commit` to `versions`."""
    where = where_it_runs()
    return {
        "commit": where["commit"],
        "source_digest": source_digest(),
        **_script_digest(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": where["machine"],
        "versions": where["versions"],
    }


def where_it_runs() -> dict[str, object]:
    """Commit, machine and versions of this process."""
    versions = dict(_versions("torch", "triton", "transformers"))
    return {"commit": _commit(), "machine": _machine(), "versions": versions}


def _command() -> str:
    """Return the command as typed, without `--out`, which is a path on one machine.

    Examples: `octetrl bench rollout ...`, or from the checkout `python -m lab.algorithms --steps 20`."""
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
    if not Path(sys.argv[0]).resolve().is_relative_to(LAB):
        return {}
    return {"benchmarks_digest": source_digest(LAB, SCRIPTS)}


def _machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"


def _versions(*packages: str) -> list[tuple[str, str]]:
    found = []
    for package in packages:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:  # triton exists only for Linux
            continue
    return found


def _commit() -> str:
    return os.environ.get("OCTETRL_COMMIT") or _commit_of_files()


@cache
def _commit_of_files() -> str:
    if (ROOT / ".git").exists() and shutil.which("git") is not None:
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        said = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
        if said:
            return said
    installed = ROOT / "octetrl" / "commit.txt"  # written by setup.py
    if installed.is_file():
        return installed.read_text(encoding="utf-8").strip()
    try:
        return version("octetrl")
    except PackageNotFoundError:
        return "unknown"
