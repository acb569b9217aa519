"""`octetrl report`: one page about one run, or several side by side (telemetry/report.py)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.output import refuse_file, terminal_columns, whole_file
from octetrl.run.folder.layout import REPORT
from octetrl.system.errors import UserError, refuse_empty
from octetrl.system.text import ESCAPE
from octetrl.telemetry.ending import as_written
from octetrl.telemetry.report import WIDTH, report_page, terminal_report
from octetrl.telemetry.report_data import read_run

SUFFIXES = (".html", ".htm")
BEGINS = b"<!doctype html>"


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN [RUN ...]", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the first run's folder.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print the report in short instead.")] = False,
) -> None:
    """Write a page about runs: what ran, curves, times, rollouts, differences. It needs no network."""
    if terminal and out is not None:
        raise UserError("--terminal and --out exclude each other; give one of them")
    for run in runs:
        refuse_empty(run, "run", "the folder of a run")
    with as_written("' or '".join(runs)):
        records = [read_run(Path(run)) for run in runs]
        lines = [*terminal_report(records, min(WIDTH, terminal_columns() or WIDTH))] if terminal else []
    if terminal:
        for line in lines:
            typer.echo(line)
        return
    path = Path(runs[0]) / REPORT if out is None else out
    refuse_file("--out", path, REPORT)
    refuse_no_page(path)
    with as_written("' or '".join(runs)):
        page = report_page(records)
    with whole_file("--out", path) as file:
        file.write_text(page, encoding="utf-8", errors=ESCAPE)
    typer.echo(f"wrote {path}")


def refuse_no_page(path: Path) -> None:
    """Raise UserError for a file that is not a page, such as one of a run's, and for a name that is no page's."""
    real, another = path.resolve(), f"give another, such as {REPORT}"
    if real.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out: '{path}' does not end in .html; {another}")
    with real.open("rb") if real.is_file() else nullcontext() as file:
        begin = b"" if file is None else file.read(len(BEGINS)).lower()
    if begin not in (b"", BEGINS):
        raise UserError(f"--out: '{path}' exists and is no page; {another}")
