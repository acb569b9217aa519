"""`octetrl report`: one page about one run, or several side by side (telemetry/report_page.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.out_file import refuse_file, whole_file
from octetrl.config.errors import UserError, refuse_empty
from octetrl.config.text import ESCAPE


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN [RUN ...]", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the first run's folder.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print the report in short instead.")] = False,
) -> None:
    """Write a page about runs: what ran, curves, times, rollouts, differences. It needs no network."""
    from octetrl.telemetry.report_data import read_run
    from octetrl.telemetry.report_page import report_page, terminal_report

    if terminal and out is not None:
        raise UserError("--terminal and --out exclude each other; give one of them")
    for run in runs:
        refuse_empty(run, "run", "the folder of a run")
    records = [read_run(Path(run)) for run in runs]
    if terminal:
        for line in terminal_report(records):
            typer.echo(line)
        return
    path = Path(runs[0]) / "report.html" if out is None else out
    refuse_file("--out", path, "report.html")
    page = report_page(records)
    with whole_file("--out", path) as file:
        file.write_text(page, encoding="utf-8", errors=ESCAPE)
    typer.echo(f"wrote {path}")
