"""`octetrl report`: one page about one run, or several side by side (telemetry/report_page.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octetrl.config.errors import UserError
from octetrl.config.text import ESCAPE


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html in the first run's folder.")] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Print the report in short instead.")] = False,
) -> None:
    """Write a page about runs: what ran, curves, times, rollouts, differences. It needs no network."""
    from octetrl.telemetry.report_data import read_run
    from octetrl.telemetry.report_page import report_page, terminal_report

    if terminal and out is not None:
        raise UserError("--terminal and --out exclude each other; give one of them")
    records = [read_run(folder) for folder in runs]
    if terminal:
        for line in terminal_report(records):
            typer.echo(line)
        return
    path = runs[0] / "report.html" if out is None else out
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out: '{path}' is not a file in a folder that exists; give one, such as report.html")
    path.write_text(report_page(records), encoding="utf-8", errors=ESCAPE)
    typer.echo(f"wrote {path}")
