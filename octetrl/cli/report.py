"""`octetrl report`: one page about one run, or several side by side (telemetry/report_page.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.check_lines import terminal_columns
from octetrl.cli.out_file import refuse_file, whole_file
from octetrl.config.errors import UserError, refuse_empty
from octetrl.config.text import ESCAPE

PAGE = "report.html"
OF_A_RUN = ("metrics.jsonl", "run.json")  # a folder with one of these is a run's
BEGINS = b"<!doctype html>"


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN [RUN ...]", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the first run's folder.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print the report in short instead.")] = False,
) -> None:
    """Write a page about runs: what ran, curves, times, rollouts, differences. It needs no network."""
    from octetrl.telemetry.report_data import read_run
    from octetrl.telemetry.report_page import report_page
    from octetrl.telemetry.terminal_report import WIDTH, terminal_report

    if terminal and out is not None:
        raise UserError("--terminal and --out exclude each other; give one of them")
    for run in runs:
        refuse_empty(run, "run", "the folder of a run")
    records = [read_run(Path(run)) for run in runs]
    if terminal:
        for line in terminal_report(records, min(WIDTH, terminal_columns() or WIDTH)):
            typer.echo(line)
        return
    path = Path(runs[0]) / PAGE if out is None else out
    refuse_file("--out", path, PAGE)
    refuse_file_of_run(path)
    page = report_page(records)
    with whole_file("--out", path) as file:
        file.write_text(page, encoding="utf-8", errors=ESCAPE)
    typer.echo(f"wrote {path}")


def refuse_file_of_run(path: Path) -> None:
    """Raise UserError for a file of a run that is not a page. One that is not there yet must be named like a page: the
    run may be about to write a file of that name."""
    real = path.resolve()
    if not any((folder / name).is_file() for folder in real.parents for name in OF_A_RUN):
        return
    if real.is_file():
        with real.open("rb") as file:
            is_page = file.read(len(BEGINS)).lower() == BEGINS or not real.stat().st_size
    else:
        is_page = real.suffix in (".html", ".htm")
    if not is_page or (real.exists() and not real.is_file()):
        raise UserError(f"--out: '{path}' is a file of a run, which a page would replace; give another, such as {PAGE}")
