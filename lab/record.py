"""What all scripts share: how one ends, the folder of the results, how a result is written, and the check for a GPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from octetrl.system.errors import UserError
from octetrl.telemetry import provenance
from octetrl.telemetry.provenance import LAB, SCRIPTS, digest_of_commit

Row = Mapping[str, object]
RESULTS = Path(__file__).parent / "results"
FORMER = LAB.with_name("benchmarks")  # what this folder was called until 2026-11-29
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def run_command(name: str, main: Callable[[], None]) -> None:
    """Run `main`. A wrong input is one line, and ends the process with 2."""
    try:
        main()
    except UserError as error:
        print(f"lab.{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def need_hopper(bench: str) -> None:
    """End the program with one line unless there is a Hopper GPU or a later one."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        print(f"lab.{bench}: no Hopper GPU here; run it on one", file=sys.stderr)
        raise SystemExit(2)


def refuse_name(name: str) -> None:
    """UserError: `--name` cannot be a part of a file's name."""
    if _NAME.fullmatch(name) is None:
        raise UserError(f"--name: '{name}' is no name of a result; give letters, digits, '.', '_' and '-'")


def show(rows: Sequence[Row], title: str, names: Sequence[str] | None = None) -> None:
    """Print the rows as a table, with every field that one of them has; `names`: of these alone."""
    columns = list(dict.fromkeys(name for row in rows for name in row if names is None or name in names))
    table = Table(*columns, title=title)
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=160).print(table)


def write_result(bench: str, name: str, rows: Sequence[Row], folder: Path = RESULTS, **further: Sequence[Row]) -> Path:
    """Write the rows (flat, one a precision and workload) and return the file. `further`: more lists of rows."""
    return provenance.write_result(bench, name, rows, folder, **further)


def is_dirty(result: Row) -> bool:
    """Whether other files were measured than those of the commit that the result names, as far as git can say: of the
    package, and for a script of this folder of those. `test_results_name_commits_that_git_has` finds commits of which
    git can't say it."""
    commit = str(result["commit"])
    if commit.endswith("-dirty"):
        return True
    scripts = digest_of_commit(commit, LAB, SCRIPTS) or digest_of_commit(commit, FORMER, SCRIPTS)
    counted = {"source_digest": digest_of_commit(commit), "benchmarks_digest": scripts}
    return any(digest not in (None, result[name]) for name, digest in counted.items() if name in result)


def model_of(result: Mapping[str, Any]) -> str | None:
    """The model of a result, as its rows or its command give it. None: they do not."""
    if result["rows"] and "model" in result["rows"][0]:
        return str(result["rows"][0]["model"])
    named = re.search(r"--model[ =](\S+)", str(result.get("command")))
    return Path(named[1]).name if named else None
