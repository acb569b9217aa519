"""`octetrl status`: what a run does now, from its folder: each of its workers, and its last step."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.output import terminal_columns, wrapped
from octetrl.run.folder.layout import LOCK, is_held, process_of
from octetrl.system.errors import refuse_empty
from octetrl.system.text import counted
from octetrl.telemetry.ending import FINISHED, as_written, read_ending, read_where
from octetrl.telemetry.sinks import METRICS_FILE, last_step
from octetrl.telemetry.step_line import WIDTH, StepLine, duration, line
from octetrl.workers.status import STATUS_FILE, status_lines


def status(run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
    """Show what a run does: each of its workers and its memory, and the last step."""
    refuse_empty(run, "run", "the folder of a run")
    with as_written(run):
        lines = list(_lines(Path(run)))
    for text in lines:
        for row in wrapped(text, terminal_columns()):
            typer.echo(row)


def _lines(folder: Path) -> Iterator[str]:
    ending = read_ending(read_where(folder))  # None: the run is live or was killed
    has_step = (folder / METRICS_FILE).is_file() and last_step(folder / METRICS_FILE) > 0
    if ending is not None and is_held(folder):
        yield f"process {_process_of(folder)} is building the run again, to continue it"
    elif ending is not None:
        yield ending.text.removesuffix(".") + ("" if ending.how == FINISHED else f"; {_resume(folder)} continues it")
    elif (folder / STATUS_FILE).exists() or not (has_step or (folder / LOCK).is_file()):
        yield from status_lines(folder)  # which refuses what is no run
    elif not has_step:
        yield _before_the_first_step(folder)
    yield from _last_step(folder) if has_step else ()
    yield from _in_flight(folder)
    process = _process_of(folder)
    if ending is None and has_step and process:
        ended = f"process {process} has ended without a message, or runs on another machine; if it was killed,"
        yield f"running, process {process}" if is_held(folder) else f"{ended} continue the run with {_resume(folder)}"


def _before_the_first_step(folder: Path) -> str:
    """What a run does that has taken its folder, and has no workers that have reported."""
    process = _process_of(folder)
    is_resumable = (folder / "config.yaml").is_file()
    if not process or not _runs(process):
        then = f"{_resume(folder)} continues it" if is_resumable else "start it again with the same command"
        owner = f"process {process}" if process else "its process"
        return f"no finished step; {owner} has ended, or runs on another machine. If it has ended, {then}"
    seconds = max(0.0, time.time() - (folder / LOCK).stat().st_mtime)
    logs = len(list((folder / "logs").glob("worker_*.log")))
    waits = "workers, model and tasks are being started"
    if is_resumable:
        waits = "everything is built, and no step has ended"
    elif logs:
        waits = f"{counted(logs, 'worker')} started, and not all have reported"
    return f"starting for {seconds:.0f} s, process {process}: {waits}"


def _process_of(folder: Path) -> int:
    """The id in the lock of a run's folder; 0 if there is none."""
    text = process_of(folder) or ""
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def _resume(folder: Path) -> str:
    return f"`octetrl train {_shown(folder / 'config.yaml')} --resume`"


def _shown(path: Path) -> str:
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def _last_step(folder: Path) -> Iterator[str]:
    """The line of the last finished step, and how long ago it was written."""
    from octetrl.telemetry.report_data import read_run  # imports numpy, which takes a moment

    record = read_run(folder)
    row = {name: value for name, value in record.rows[-1].items() if value is not None}
    step, total = int(row["step"]), record.recipe.get("steps")
    width = min(WIDTH, terminal_columns() or WIDTH)
    lines = StepLine(int(total) if isinstance(total, int) else step, record.mismatch_limit)
    yield line(lines.parts(step, row, width=width))
    ago = duration(time.time() - (folder / METRICS_FILE).stat().st_mtime) or "0 s"
    yield from record.left_out
    if "checkpoint/stored_step" in row:
        stored, failed = int(row["checkpoint/stored_step"]), int(row["checkpoint/failed_uploads"])
        where = (record.recipe.get("checkpoint") or {}).get("store")
        yield f"{where}: {f'step {stored}' if stored else 'no checkpoint yet'}, {counted(failed, 'failed upload')}"
    yield f"written {ago} ago; `octetrl report {_shown(folder)} --terminal` shows all steps"


def _in_flight(folder: Path) -> Iterator[str]:
    """What becomes of the KV cache of unfinished answers if weights change in flight, also where the recipe asks for
    something else."""
    from octetrl.config.in_words import CACHE_OF_ANSWERS  # imports the recipe's schema, which takes a moment
    from octetrl.telemetry.report_data import read_recipe

    in_force = read_where(folder).get("weights_in_flight")
    said = CACHE_OF_ANSWERS.get(in_force) if isinstance(in_force, str) else None
    if said is None:
        return
    cluster = read_recipe(folder).get("cluster")
    asked = cluster.get("weights_in_flight") if isinstance(cluster, dict) else None
    instead = f"; {asked} cannot keep a calibrated cache" if asked == "keep_cache" != in_force else ""
    yield f"weights in flight: the KV cache of unfinished answers is {said}{instead}"
