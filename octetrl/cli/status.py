"""`octetrl status`: what each worker of a run does now, from the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octetrl.workers.many.status import status_lines


def status(run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run on several workers.")]) -> None:
    """Show what each worker of a run does, for how long, and its memory."""
    for line in status_lines(Path(run)):
        typer.echo(line)
