"""The file that a worker's process prints into, `logs/worker_N.log`."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def print_into(log: Path) -> None:
    """Sends all that the process prints into `log`, also what a library prints without Python."""
    if not log.parent.is_dir():
        return  # a machine that does not see the run folder (nodes.py)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)


def last_lines(log: Path, count: int = 20) -> tuple[str, ...]:
    """The last lines of a file; none if it is not there."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line for line in text.splitlines() if line.strip())[-count:]
