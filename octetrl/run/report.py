"""Writes `report.html` into the folder of a run that ends, however it ends."""

from __future__ import annotations

from pathlib import Path

from octetrl.config.errors import UserError
from octetrl.telemetry.console import Console
from octetrl.telemetry.report_data import read_run
from octetrl.telemetry.report_page import report_page
from octetrl.telemetry.sinks import METRICS_FILE, last_step

REPORT = "report.html"


def leave_report(folder: Path, console: Console) -> None:
    """Writes the report if the run has finished a step. A report that can't be made is a warning: the run's results do
    not depend on it."""
    if not last_step(folder / METRICS_FILE):
        return
    try:
        (folder / REPORT).write_text(report_page([read_run(folder)]), encoding="utf-8")
    except (OSError, UserError, ValueError, TypeError, KeyError) as error:
        console.warn(f"no {REPORT} was written ({error}); `octetrl report {folder}` tries again")
