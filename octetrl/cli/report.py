"""`octetrl report`: one page about one run, or several side by side (telemetry/report_page.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.out_file import refuse_file, whole_file
from octetrl.cli.terminal import terminal_columns
from octetrl.run.folder.layout import REPORT
from octetrl.system.errors import UserError, refuse_empty
from octetrl.system.text import ESCAPE

SUFFIXES = (".html", ".htm")
# A folder with two of these is a run's. One alone may be of anything, such as a home folder with a config.yaml.
MARKS = ("config.yaml", "lock", "run.json", "metrics.jsonl", "checkpoints")
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
    path = Path(runs[0]) / REPORT if out is None else out
    refuse_file("--out", path, REPORT)
    refuse_file_of_run(path, [record.folder for record in records])
    page = report_page(records)
    with whole_file("--out", path) as file:
        file.write_text(page, encoding="utf-8", errors=ESCAPE)
    typer.echo(f"wrote {path}")


def refuse_file_of_run(path: Path, runs: Sequence[Path] = ()) -> None:
    """Raise UserError for a file in a run's folder that is not a page. A new or empty file there must be named like a
    page: the run may be about to write it. runs: folders that are known to be runs."""
    real, known = path.resolve(), [run.resolve() for run in runs]
    folder = next((one for one in real.parents if one in known or _is_run(one)), None)
    if folder is None:
        return
    another = f"give another, such as {REPORT}"
    if real.exists() and not real.is_file():
        raise UserError(f"--out: '{path}' in the run folder '{folder}' is not a file; {another}")
    if real.is_file() and real.stat().st_size:
        with real.open("rb") as file:
            if file.read(len(BEGINS)).lower() != BEGINS:
                raise UserError(f"--out: '{path}' is a file of the run '{folder}', and not a page; {another}")
    elif real.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out: '{path}' is in the run folder '{folder}', where a page ends in .html; {another}")


def _is_run(folder: Path) -> bool:
    return sum((folder / name).exists() for name in MARKS) >= 2
