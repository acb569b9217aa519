"""`octetrl status`: what a run does now, from its folder: each of its workers, or its last step."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from octetrl.config.errors import refuse_empty
from octetrl.workers.many.status import STATUS_FILE, status_lines


def status(run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
    """Show what a run does: each of its workers and its memory, or the last step."""
    refuse_empty(run, "run", "the folder of a run")
    folder = Path(run)
    is_alone = not (folder / STATUS_FILE).exists() and (folder / "metrics.jsonl").is_file()
    for line in chain(_last_step(folder) if is_alone else status_lines(folder), _in_flight(folder)):
        typer.echo(line)


def _last_step(folder: Path) -> Iterator[str]:
    """Of a run in one process, or of one that has ended."""
    from octetrl.telemetry.report_data import read_run
    from octetrl.telemetry.sinks import METRICS_FILE
    from octetrl.telemetry.step_line import StepLine, duration, line

    record = read_run(folder)
    row = {name: value for name, value in record.rows[-1].items() if value is not None}
    step, total = int(row["step"]), record.recipe.get("steps")
    yield line(StepLine(total if isinstance(total, int) else step).parts(step, row))
    ago = duration(time.time() - (folder / METRICS_FILE).stat().st_mtime) or "0 s"
    yield from record.left_out
    shown = f"./{folder}" if str(folder).startswith("-") else str(folder)
    yield f"written {ago} ago; `octetrl report {shlex.quote(shown)} --terminal` shows all steps"


def _in_flight(folder: Path) -> Iterator[str]:
    """What becomes of the KV cache of unfinished answers if weights change in flight, also where the recipe asks for
    something else."""
    from octetrl.config.kept_cache import CACHE_OF_ANSWERS
    from octetrl.telemetry.report_data import read_recipe, read_where

    in_force = read_where(folder).get("weights_in_flight")
    said = CACHE_OF_ANSWERS.get(in_force) if isinstance(in_force, str) else None
    if said is None:
        return
    cluster = read_recipe(folder).get("cluster")
    asked = cluster.get("weights_in_flight") if isinstance(cluster, dict) else None
    instead = f"; {asked} cannot keep a calibrated cache" if asked == "keep_cache" != in_force else ""
    yield f"weights in flight: the KV cache of unfinished answers is {said}{instead}"
